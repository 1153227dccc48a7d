cd /tmp/w-ex-train; export PYTHONPATH=$PWD:$PWD/scratch_ex MGLU_REQUIRE_GPU=1 OMP_NUM_THREADS=4
nvidia-smi --query-gpu=name --format=csv | tail -1
(timeout 100 python3 -m pytest -q --maxfail=12 -p no:cacheprovider -n 0 tests/gpu/test_experts_training_gpu.py > $OUT/gpu.txt 2>&1; tail -40 $OUT/gpu.txt | cut -c1-220)
timeout 40 python3 scratch_ex/ex_micro.py 2>&1 | cut -c1-200
LIMIT=40 timeout 60 python3 scratch_ex/ex_bench.py Qwen3-30B-A3B:balanced:1 Qwen3-30B-A3B:balanced:4 2>&1 | grep -v Warning | tail -30
