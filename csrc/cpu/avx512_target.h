// AVX-512's intrinsics and target. The tests emulate both by plain loops, for machines without AVX-512.
#if defined(MGLU_EMULATE_AVX512)
#include MGLU_EMULATE_AVX512
#define MGLU_BEGIN_AVX512(names)
#define MGLU_END_AVX512
#else
#include <immintrin.h>
#define MGLU_BEGIN_AVX512(names) MGLU_BEGIN_TARGET(names)
#define MGLU_END_AVX512 MGLU_END_TARGET
#endif
