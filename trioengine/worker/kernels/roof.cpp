// Loops that do one thing as fast as this machine can: what they reach is the roof of the kernels.

#include "integers.h"

namespace {

constexpr int CHAINS = 8;  // independent sums: enough to hide the latency of an instruction

}  // namespace

extern "C" {

// The sum of all words: memory is read, and nothing else.
uint32_t read(const uint32_t *data, int64_t count) {
    uint32_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (int64_t piece = 0; piece < count / (CHAINS * LANES); piece++) {
        Words words[CHAINS];
        std::memcpy(words, data + piece * CHAINS * LANES, sizeof words);
        for (int i = 1; i < CHAINS; i++) words[0] ^= words[i];
        total += words[0][0];
    }
    return total;
}

// Numbers of 4 bytes in a register.
int64_t lanes() { return LANES; }

// Each of the threads multiplies and adds CHAINS registers of codes in each round. All have other numbers, or the compiler
// computes them once.
int64_t multiply_integers(int64_t rounds, int64_t threads) {
    int64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (int64_t thread = 0; thread < threads; thread++) {
        Sums sums[CHAINS]{};
        Bytes weights[CHAINS];
        for (int i = 0; i < CHAINS; i++) weights[i] = Bytes{} + uint8_t((thread + i) % 15 + 1);
        for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 8
            for (int i = 0; i < CHAINS; i++) sums[i] = dot(sums[i], weights[i], round);
        for (int i = 0; i < CHAINS; i++) total += sums[i][0];
    }
    return total;
}

// The same of floats.
double multiply_floats(int64_t rounds, int64_t threads) {
    double total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (int64_t thread = 0; thread < threads; thread++) {
        Floats sums[CHAINS]{}, weights[CHAINS];
        for (int i = 0; i < CHAINS; i++) weights[i] = all(1.0f / float(thread + i + 2));
        for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 8
            for (int i = 0; i < CHAINS; i++) sums[i] = multiply_add(sums[i], weights[i], all(float(round)));
        for (int i = 0; i < CHAINS; i++) total += sums[i][0];
    }
    return total;
}

// Numbers of bfloat16 that a product of the kernels multiplies at a time, in each lane.
int64_t numbers_in_a_lane() { return INSTRUCTIONS >= BF16 ? 2 : 1; }

// The same of bfloat16: in pairs, or as floats.
double multiply_bfloat16(int64_t rounds, int64_t threads) {
#if INSTRUCTIONS >= BF16
    double total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (int64_t thread = 0; thread < threads; thread++) {
        Floats sums[CHAINS]{};
        Words weights[CHAINS];
        for (int i = 0; i < CHAINS; i++) weights[i] = Words{} + uint32_t(0x3f803f80 + thread + i);
        for (int64_t round = 0; round < rounds; round++)
#pragma GCC unroll 8
            for (int i = 0; i < CHAINS; i++) sums[i] = add_pair(sums[i], weights[i], uint32_t(0x3f803f80 + round));
        for (int i = 0; i < CHAINS; i++) total += sums[i][0];
    }
    return total;
#else
    return multiply_floats(rounds, threads);
#endif
}

}  // extern "C"
