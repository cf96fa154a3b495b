// Online softmax: turns one block of scores of one query row into weights.
#pragma once
#include "vector.h"

namespace QUIRE_ISA {

constexpr long KEYS = 64;  // keys per block
constexpr float NOTHING = -__builtin_inff();

// The state of a row: its largest score so far, and the sum of e^(score - largest). A sink is a score without a value.
struct RowState {
    float most, total;
};

struct Scoring {
    float scale, soft_cap;

    Vec of(Vec product) const {
        const Vec score = product * scale;
        return soft_cap > 0 ? soft_cap * hyperbolic_tangent(score / soft_cap) : score;
    }
};

// Turns the products [0, count) of a row into weights; the row sees only keys in [first, stop). Products past `count` may
// be arbitrary, and weights up to the next whole vector are set to 0. Returns the factor for the row's earlier sums.
template <class T>
inline float weigh(float* products, T* weights, long count, long first, long stop, const Scoring& scoring,
                   RowState& state) {
    Ints lane{};
    for (int i = 0; i < LANES; i++) lane[i] = i;
    const Vec nothing = broadcast(NOTHING);
    Vec most_here = nothing;
    for (long j = 0; j < count; j += LANES) {
        const Ints key = lane + static_cast<int32_t>(j);
        const Vec score = scoring.of(load(products + j));
        const Vec seen = (key >= static_cast<int32_t>(first)) & (key < static_cast<int32_t>(stop)) ? score : nothing;
        store(products + j, seen);
        most_here = maximum(seen, most_here);
    }
    const float here = maximum_of(most_here);
    // If the row sees no key here, or all scores are NaN, no score is the largest. Subtracting 0 then turns hidden scores
    // into weights of 0, and keeps NaN. Subtracting -inf would turn hidden scores into NaN.
    const float most = here > state.most ? here : state.most == NOTHING ? 0.0f : state.most;
    Vec sum{};
    for (long j = 0; j < count; j += LANES) {
        const Vec weight = exponential(load(products + j) - most);
        store(weights + j, weight);
        sum += weight;
    }
    if (first >= stop) return 1.0f;
    Vec earlier = broadcast(state.most - most);
    const float factor = state.most == NOTHING ? 0.0f : exponential(earlier)[0];
    state.total = state.total * factor + sum_of(sum);
    state.most = most;
    return factor;
}

}  // namespace QUIRE_ISA
