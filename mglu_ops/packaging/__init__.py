"""Packages of machine code, and the operator library for C++ programs; `csrc/README.md` shows how to use both.

- `export` compiles a model into a package, `package` reads and writes its description, `load` checks and loads it.
- `describe` makes a package's description from the program; `inputs` checks the inputs of each call against it.
- `seal` writes and checks the checksum at the end of packages and weights files.
- `library` builds `libmglu_ops.so`; `device_code` compiles the CUDA kernels that go into it, and `generated`
  writes the files of its sources that are made from lists in Python.
- `composite` is `mglu::forward` in torch operators; `cpp_runtime` finds packages that contain a copy of libstdc++.
- `tensor_file` writes tensors for C++ programs; `command` is the command line.

Importing `mglu_ops.packaging` imports none of these modules, because they import parts of torch that load slowly.
"""
