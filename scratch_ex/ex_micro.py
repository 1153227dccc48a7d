import sys; sys.path.insert(0,"/tmp")
import torch, torch.nn.functional as F, time
from mglu_ops.backends.triton import grouped as g
from mglu_ops.backends.cuda.kernels import training_steps as st
from mglu_ops.timer import *
def t(f,n=5):
    for _ in range(2): f()
    torch.cuda.synchronize(); a=torch.cuda.Event(enable_timing=True); b=torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(n): f()
    b.record(); torch.cuda.synchronize(); return a.elapsed_time(b)/n
for name,(E,d,h,K) in {"qwen":(128,768,2048,8),"mixtral":(8,14336,4096,2),"gptoss":(32,2880,2880,4)}.items():
    S=8192*K; x=torch.randn(S,h,device="cuda",dtype=torch.bfloat16); w=torch.randn(E,d,h,device="cuda",dtype=torch.bfloat16)
    c=torch.multinomial(torch.ones(E,device="cuda"),S,True); offs=torch.bincount(c,minlength=E).cumsum(0).int()
    fl=2*S*d*h/1e9
    ms=t(lambda:F.grouped_mm(x,w.transpose(1,2),offs=offs)); print(name,"grouped_mm NT %.3f ms %.0f TF"%(ms,fl/ms))
    w2=torch.cat([w,w],1); ms=t(lambda:F.grouped_mm(x,w2.transpose(1,2),offs=offs)); print(name,"  stacked 2 NT %.3f ms %.0f TF"%(ms,2*fl/ms))
    a=torch.randn(S,2*d,device="cuda",dtype=torch.bfloat16)
    ms=t(lambda:F.grouped_mm(a,w2,offs=offs)); print(name,"  dx stacked 2 %.3f ms %.0f TF"%(ms,2*fl/ms))
    ms=t(lambda:F.grouped_mm(a[:,:d],w,offs=offs)); print(name,"  dx one %.3f ms %.0f TF"%(ms,fl/ms))
    ms=t(lambda:F.grouped_mm(a.t(),x,offs=offs)); print(name,"  dW stacked 2 %.3f ms %.0f TF"%(ms,2*fl/ms))
    ms=t(lambda:F.grouped_mm(a[:,d:].t(),x,offs=offs)); print(name,"  dW one %.3f ms %.0f TF"%(ms,fl/ms))
    ms=t(lambda:F.grouped_mm(x.t(),a,offs=offs)); print(name,"  dW^T stacked %.3f ms %.0f TF"%(ms,2*fl/ms))
    for (br,bc,bk,wp,sg) in ((128,256,64,8,3),(128,256,64,8,4),(128,128,64,8,3),(128,128,64,4,4)):
        g.BLOCK_ROWS,g.BLOCK_COLUMNS,g.BLOCK_K,g.WARPS,g.STAGES=br,bc,bk,wp,sg
        ms=t(lambda:g.grouped_products(x,w,offs)); print(name,"  triton f32 %s %.3f ms %.0f TF"%((br,bc,bk,wp,sg),ms,fl/ms),flush=True)
    wv=w.view(E*d,h); packed=torch.randint(256,(E,d,h//8,1),device="cuda").byte()
    for nm,f,by in (("flip",lambda:st.flip_signs(w,packed),3),("flip parts",lambda:st.flip_signs(w,packed,with_weight=False,parts=True),3),):
        ms=t(f); print(name,"  %s %.3f ms %.0f GB/s"%(nm,ms,by*w.nbytes/ms/1e6))
    pr=w2.new_empty(E,1,d,h); ms=t(lambda:st.weight_gradients(w,pr,w,packed,w,pr)); print(name,"  wgrads %.3f ms %.0f GB/s"%(ms,5*w.nbytes/ms/1e6))
    y=x.new_empty(S,d); p=x.new_empty(S,2,d); q=x.new_empty(S,2,d).normal_()
    ms=t(lambda:st.partials(q,"silu",None,p,y,parts=True)); print(name,"  partials %.3f ms %.0f GB/s"%(ms,5*y.nbytes/ms/1e6))
    ms=t(lambda:st.scale(y,p)); print(name,"  scale %.3f ms %.0f GB/s"%(ms,5*y.nbytes/ms/1e6))
    ms=t(lambda:st.clear_rows(y,offs)); print(name,"  clear %.4f ms"%ms,flush=True)
    del x,w,w2,a,pr,y,p,q
