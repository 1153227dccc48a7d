import sys; sys.path.insert(0,"/tmp")
import torch, pathlib, time, os
from benchmarks import train_experts as te, timing
import ex_patch
t0=time.time()
plan=[a.split(":") for a in sys.argv[1:]]
for m,l,n in plan:
    if time.time()-t0>float(os.environ.get("LIMIT","70")): print("out of time before",m,l,n); break
    try:
        rows=te.bench(te.Problem(m,l,int(n)),rounds=5,load=0.04)
    except Exception as e:
        print(m,l,n,"FAILED",repr(e)[:600]); continue
    by={r.variant:r for r in rows}
    for r in rows:
        print(f"{m} {l} n={n} {r.variant:28} {r.microseconds/1000:8.3f} ms +-{r.spread/1000:.3f} peak {r.extra.get('peak_mb')} {r.extra.get('errors','')} {r.extra.get('bits_repeat','')} {r.extra.get('left_out','')}",flush=True)
    op,na,tr=(by[k] for k in ("operator, eager","naive compiled","complement trick compiled"))
    print("   naive/op %.3f trick/op %.3f memory op/naive %.3f   (%.0f s)"%(na.microseconds/op.microseconds,tr.microseconds/op.microseconds,op.extra.get("peak_mb",0)/na.extra.get("peak_mb",1e9),time.time()-t0),flush=True)
