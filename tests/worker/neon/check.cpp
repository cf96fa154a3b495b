// Compares the kernels of one instruction set with plain loops in double, without Python or torch, for processors that can
// only be emulated. `make kernels-neon` compiles this for ARM and runs it under qemu. It also runs on any other processor.
#include "quire_cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

namespace {

uint32_t state = 1;
int failures = 0;

float drawn() {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) / 8388608.0f - 1.0f;
}

float rounded(float value) {  // to bfloat16, ties to even
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    memcpy(&value, &bits, 4);
    return value;
}

// Numbers in a dtype, and the same numbers as float32.
struct Tensor {
    int dtype;
    std::vector<float> wide;
    std::vector<uint16_t> narrow;

    Tensor(int dtype, size_t size) : dtype(dtype), wide(size), narrow(size) {
        for (float& value : wide) value = dtype == QUIRE_BFLOAT16 ? rounded(drawn()) : drawn();
        store();
    }
    void* data() { return dtype == QUIRE_BFLOAT16 ? static_cast<void*>(narrow.data()) : wide.data(); }
    void store() {
        for (size_t i = 0; i < wide.size(); i++) memcpy(&narrow[i], reinterpret_cast<char*>(&wide[i]) + 2, 2);
    }
    void load() {
        if (dtype != QUIRE_BFLOAT16) return;
        for (size_t i = 0; i < wide.size(); i++) {
            const uint32_t bits = static_cast<uint32_t>(narrow[i]) << 16;
            memcpy(&wide[i], &bits, 4);
        }
    }
};

void expect(const char* what, int dtype, const std::vector<float>& found, const std::vector<double>& wanted) {
    const double tolerance = dtype == QUIRE_BFLOAT16 ? 1e-2 : 2e-5;
    double worst = 0;
    for (size_t i = 0; i < wanted.size(); i++) {
        const double error = fabs(found[i] - wanted[i]) / (1 + fabs(wanted[i]));
        worst = error <= worst ? worst : error;  // also becomes NaN if the error is NaN
    }
    const bool is_near = worst <= tolerance;
    failures += !is_near;
    printf("%-10s %-9s %.1e %s\n", what, dtype == QUIRE_BFLOAT16 ? "bfloat16" : "float32", worst, is_near ? "" : "FAR");
}

void check_linear(int dtype, long rows, bool is_gated) {
    const long inputs = 70, outputs = 100, columns = is_gated ? QUIRE_PANEL / 2 : QUIRE_PANEL;
    const long panels = (outputs + columns - 1) / columns, words = inputs / (dtype == QUIRE_BFLOAT16 ? 2 : 1);
    Tensor gate(dtype, outputs * inputs), up(dtype, outputs * inputs), x(dtype, rows * inputs), y(dtype, rows * outputs);
    std::vector<uint32_t> packed(panels * words * QUIRE_PANEL);
    QuirePack pack{gate.data(), packed.data(), inputs, outputs, inputs, 0, 0, columns, dtype};
    quire_pack(&pack);
    if (is_gated) {
        pack.weight = up.data();
        pack.offset = columns;
        quire_pack(&pack);
    }
    const QuireLinear linear{x.data(), packed.data(), nullptr, nullptr, y.data(), inputs, outputs, outputs, rows,
                             inputs, outputs, is_gated, dtype};
    quire_linear(&linear);
    y.load();
    std::vector<double> wanted(rows * outputs);
    for (long r = 0; r < rows; r++)
        for (long o = 0; o < outputs; o++) {
            double a = 0, b = 0;
            for (long i = 0; i < inputs; i++) {
                a += double(x.wide[r * inputs + i]) * gate.wide[o * inputs + i];
                b += double(x.wide[r * inputs + i]) * up.wide[o * inputs + i];
            }
            wanted[r * outputs + o] = is_gated ? a / (1 + exp(-a)) * b : a;
        }
    expect(is_gated ? "gated" : "linear", dtype, y.wide, wanted);
}

void check_norm(int dtype) {
    const long rows = 5, size = 77;
    Tensor x(dtype, rows * size), weight(dtype, size), y(dtype, rows * size);
    const QuireNorm norm{x.data(), y.data(), weight.data(), size, size, rows, size, dtype, 1e-5f};
    quire_norm(&norm);
    y.load();
    std::vector<double> wanted(rows * size);
    for (long r = 0; r < rows; r++) {
        double squares = 0;
        for (long i = 0; i < size; i++) squares += pow(x.wide[r * size + i], 2);
        for (long i = 0; i < size; i++)
            wanted[r * size + i] = x.wide[r * size + i] / sqrt(squares / size + 1e-5) * weight.wide[i];
    }
    expect("norm", dtype, y.wide, wanted);
}

// One sequence with 37 keys on pages of 16 in shuffled order; its last `queries` tokens attend.
void check_attention(int dtype, long queries) {
    const long heads = 4, kv_heads = 2, dim = 64, keys = 37, page = 16, pages = 3, row = kv_heads * dim;
    Tensor q(dtype, queries * heads * dim), cache(dtype, pages * 2 * page * row), y(dtype, queries * heads * dim);
    const int32_t indptr[] = {0, int32_t(queries)}, lengths[] = {int32_t(keys)}, table[] = {2, 0, 1};
    QuireAttend attend{};
    attend.query_indptr = indptr, attend.kv_lengths = lengths, attend.block_tables = table;
    attend.table_stride = pages, attend.sequences = 1;
    attend.query = q.data(), attend.query_token_stride = heads * dim, attend.query_head_stride = dim;
    attend.pages = cache.data(), attend.page_stride = 2 * page * row, attend.output = y.data();
    attend.query_heads = heads, attend.kv_heads = kv_heads, attend.head_dim = dim, attend.page_size = page;
    attend.window_left = -1, attend.dtype = dtype, attend.scale = 0.3f;
    quire_attend(&attend);
    y.load();
    std::vector<double> wanted(queries * heads * dim);
    for (long t = 0; t < queries; t++)
        for (long h = 0; h < heads; h++) {
            double total = 0, most = -1e300, scores[64];
            const long seen = keys - queries + t + 1, kv = h / (heads / kv_heads);
            auto element = [&](long k, long value, long i) {
                return double(cache.wide[((table[k / page] * 2 + value) * page + k % page) * row + kv * dim + i]);
            };
            for (long k = 0; k < seen; k++) {
                scores[k] = 0;
                for (long i = 0; i < dim; i++) scores[k] += 0.3f * q.wide[(t * heads + h) * dim + i] * element(k, 0, i);
                most = scores[k] > most ? scores[k] : most;
            }
            for (long k = 0; k < seen; k++) total += exp(scores[k] - most);
            for (long k = 0; k < seen; k++)
                for (long i = 0; i < dim; i++)
                    wanted[(t * heads + h) * dim + i] += exp(scores[k] - most) / total * element(k, 1, i);
        }
    expect(queries > 2 ? "prompt" : "decode", dtype, y.wide, wanted);
}

void check_greedy(long vocabulary) {
    const long rows = 6;
    Tensor x(QUIRE_FLOAT32, rows * vocabulary);
    for (float& value : x.wide) value = static_cast<int>(value * 8);  // makes many logits equal
    x.wide[vocabulary / 2] = NAN;
    x.wide[vocabulary + vocabulary / 3] = INFINITY;
    for (long j = 0; j < vocabulary; j++) x.wide[2 * vocabulary + j] = -INFINITY, x.wide[3 * vocabulary + j] = j ? 0.0f : -0.0f;
    int64_t tokens[rows];
    uint8_t are_bounded[rows];
    const QuireGreedy greedy{x.wide.data(), tokens, are_bounded, vocabulary, rows, vocabulary, 100};
    quire_greedy(&greedy);
    std::vector<float> found;
    std::vector<double> wanted;
    for (long row = 0; row < rows; row++) {
        const float* logits = x.wide.data() + row * vocabulary;
        long best = 0;
        for (long j = 1; j < vocabulary; j++)
            if (logits[best] == logits[best] && (logits[j] != logits[j] || logits[j] > logits[best])) best = j;
        found.push_back(tokens[row]), found.push_back(are_bounded[row]);
        wanted.push_back(best), wanted.push_back(fabs(logits[best]) <= 100);
    }
    expect("greedy", QUIRE_FLOAT32, found, wanted);
}

}  // namespace

int main() {
    printf("%s\n", quire_instruction_sets());
    for (int dtype : {QUIRE_FLOAT32, QUIRE_BFLOAT16}) {
        for (long rows : {1, 7}) check_linear(dtype, rows, false), check_linear(dtype, rows, true);
        check_norm(dtype);
        for (long queries : {1, 2, 30}) check_attention(dtype, queries);
    }
    for (long vocabulary : {1, 5, 16, 255, 1003}) check_greedy(vocabulary);
    return failures != 0;
}
