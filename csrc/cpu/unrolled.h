// Loops over constants. Included inside a file's own namespace, below the target pragma.
//
// GCC unrolls a loop that a pragma marks after it has decided which arrays are registers: one that only unrolling makes
// so stays in memory.

#if defined(__OPTIMIZE__)
#define MGLU_STEP __attribute__((always_inline))
#else
#define MGLU_STEP  // a sanitizer's compiler takes minutes over what is all in one function
#endif

template <class Step, int... I>
MGLU_STEP inline void unrolled(Step step, std::integer_sequence<int, I...>) {
    (step(std::integral_constant<int, I>()), ...);
}
// step(0) to step(Count - 1), each with an argument that is a constant.
template <int Count, class Step>
MGLU_STEP inline void unrolled(Step step) {
    unrolled(step, std::make_integer_sequence<int, Count>());
}
