"""The fusion pass: it recognises MGLU layers in a graph, proves that it may fuse them, rewrites them, and reports.

`symbols` reads nodes, `mutation` tells what they overwrite, `values` is what can be known of them, `recognise` finds
it out by the rules of `mask_rules`, `weight_rules`, `projection_rules` and `gated_rules`, `sites` holds the proof
obligations, `rewrite` changes the graph, `fusion` is the pass, `install` and `backend` turn it on, `report` says what
it did, and `explain` what it would do.
"""
