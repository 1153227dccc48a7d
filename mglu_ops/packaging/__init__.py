"""From a model to a package of machine code, and back: `export` and `load`, and the operator library for C++ programs.

`package` reads what a package says of itself, `export` makes one, `load` checks it against this process and opens it,
`library` builds and opens `libmglu_ops.so`, `shim` is how a package calls that without a dispatcher, `command` the
command line. Importing this loads none of them: the first uses `torch.export`, the others a compiler.
"""
