// Compile-time loops. Included inside a file's own namespace, below the target pragma.
//
// GCC unrolls a loop with a pragma only after it has decided which arrays live in registers. An array whose indices
// become constants by that unrolling would stay in memory. The loops of this file are unrolled earlier.

#if defined(__OPTIMIZE__)
#define MGLU_STEP __attribute__((always_inline))
#else
#define MGLU_STEP  // without optimisation (sanitizers) nothing is inlined: one large function takes minutes to compile
#endif

template <class Step, int... I>
MGLU_STEP inline void unrolled(Step step, std::integer_sequence<int, I...>) {
    (step(std::integral_constant<int, I>()), ...);
}
// Calls step(0) to step(Count - 1), each with a compile-time constant.
template <int Count, class Step>
MGLU_STEP inline void unrolled(Step step) {
    unrolled(step, std::make_integer_sequence<int, Count>());
}
