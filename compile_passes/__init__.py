"""The fusion pass: it recognises MGLU layers in a graph, proves that it may fuse them, rewrites them, and reports.

`symbols` reads nodes, `values` is what can be known of them, `recognise` finds it out, `sites` holds the proof
obligations, `rewrite` changes the graph, `fusion` is the pass, `install` and `backend` turn it on.
"""
