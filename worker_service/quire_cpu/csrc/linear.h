// Linear layers on packed weights. A panel has 64 adjacent columns for all inputs, `[words, 64]`. It is read once in
// order for six rows of the input.
#pragma once
#include "product.h"

namespace QUIRE_ISA {

// Rows that share one read of a panel; their inputs stay in the cache.
constexpr long LINEAR_ROWS = 96;

template <class T>
struct Epilogue {
    const QuireLinear& a;

    // Writes the sums of a panel, with bias, activation and residual.
    void write(const float* sums, long row, long panel) const {
        const long width = a.gate ? QUIRE_PANEL / 2 : QUIRE_PANEL, first = panel * width;
        const long count = smaller(width, a.outputs - first);
        const float* bias = a.bias ? a.bias + panel * QUIRE_PANEL : nullptr;
        T* output = static_cast<T*>(a.output) + row * a.output_stride + first;
        const T* residual = a.residual ? static_cast<const T*>(a.residual) + row * a.residual_stride + first : nullptr;
        for (long i = 0; i < count; i += LANES) {
            Vec value = load(sums + i);
            if (bias) value += load(bias + i);
            if (a.gate) {
                Vec up = load(sums + width + i);
                if (bias) up += load(bias + width + i);
                value = (a.gate == QUIRE_SILU ? silu(value) : gelu_tanh(value)) * up;
            }
            const long cut = count - i;
            if (cut >= LANES) {
                store(output + i, residual ? value + load(residual + i) : value);
            } else {
                store_some(output + i, residual ? value + load_some(residual + i, cut) : value, cut);
            }
        }
    }
};

template <class T>
void linear_of(const QuireLinear& a) {
    const long words = a.inputs / PER_WORD<T>, columns = a.gate ? QUIRE_PANEL / 2 : QUIRE_PANEL;
    const long panels = (a.outputs + columns - 1) / columns;
    const Epilogue<T> epilogue{a};
    parallel(panels, [&](int64_t panel) {
        const Word* weight = static_cast<const Word*>(a.weight) + panel * words * QUIRE_PANEL;
        float sums[LINEAR_ROWS * QUIRE_PANEL];
        for (long row = 0; row < a.rows; row += LINEAR_ROWS) {
            const long count = smaller(LINEAR_ROWS, a.rows - row);
            const T* input = static_cast<const T*>(a.input) + row * a.input_stride;
            product<T>(count, QUIRE_PANEL, reinterpret_cast<const Word*>(input), a.input_stride / PER_WORD<T>, weight,
                       QUIRE_PANEL, words, sums, QUIRE_PANEL, false);
            for (long i = 0; i < count; i++) epilogue.write(sums + i * QUIRE_PANEL, row + i, panel);
        }
    });
}

template <class T>
void pack_of(const QuirePack& a) {
    const long words = a.inputs / PER_WORD<T>, last = a.first + a.rows;
    const long first_panel = a.first / a.columns, panels = (last + a.columns - 1) / a.columns - first_panel;
    parallel(panels, [&](int64_t index) {
        const long panel = first_panel + index;
        const long start = larger(a.first, panel * a.columns), stop = smaller(last, (panel + 1) * a.columns);
        const Word* rows[QUIRE_PANEL];
        for (long i = start; i < stop; i++) {
            const T* row = static_cast<const T*>(a.weight) + (i - a.first) * a.weight_stride;
            rows[i - start] = reinterpret_cast<const Word*>(row);
        }
        Word* packed = static_cast<Word*>(a.packed) + panel * words * QUIRE_PANEL + a.offset + start % a.columns;
        pack_columns(rows, stop - start, words, packed, QUIRE_PANEL);
    });
}

}  // namespace QUIRE_ISA
