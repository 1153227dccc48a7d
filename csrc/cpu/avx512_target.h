// The intrinsics of AVX-512, and macros that let functions use them. Tests on machines without AVX-512 define
// MGLU_EMULATE_AVX512 as the name of a header that replaces the intrinsics by plain loops.
#if defined(MGLU_EMULATE_AVX512)
#include MGLU_EMULATE_AVX512
#define MGLU_BEGIN_AVX512(names)
#define MGLU_END_AVX512
#else
#include <immintrin.h>
#define MGLU_BEGIN_AVX512(names) MGLU_BEGIN_TARGET(names)
#define MGLU_END_AVX512 MGLU_END_TARGET
#endif
