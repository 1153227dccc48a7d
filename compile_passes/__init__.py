"""The fusion pass: it recognises MGLU layers in a graph, proves that it may fuse them, rewrites them, and reports.

`symbols` binds the calls of a graph to signatures, `shapes` reads what tracing recorded of their results, `mutation`
and `memory` tell what they overwrite. `values` is what can be known of a node; `recognise` finds it out by the rules of
`rules`, with `pointwise` for functions of masks and `formulas` for activations. `sites` holds the proof obligations,
`near_misses` finds what no site was found in, `rewrite` changes the graph, and `fusion` is the pass. `install` and
`backend` turn it on, `exported` runs it over exported programs, `report` says what it did, and `explain` what it would
do.
"""
