// The C interface of the CPU kernels: pointers, and sizes in elements, without torch. `interface.py` declares it in Python.
//
// Tensors are float32 or bfloat16, given by `dtype`, and dense in their last dimension. A stride is the number of elements
// from one row to the next. Sums are float32 everywhere. Nothing is checked here: the callers in `ops.py` check arguments.
#pragma once
#include <stdint.h>

#define QUIRE_EXPORT extern "C" __attribute__((visibility("default")))

enum QuireDtype { QUIRE_FLOAT32 = 0, QUIRE_BFLOAT16 = 1 };
// What follows a linear layer: nothing, or an activation of the first half of each panel times its second half.
enum QuireGate { QUIRE_NO_GATE = 0, QUIRE_SILU = 1, QUIRE_GELU_TANH = 2 };

// softmax(scale * Q K^T) V over pages, causal and right-aligned; see `AttentionPlan.attend`.
struct QuireAttend {
    const int32_t* query_indptr;   // [sequences + 1]
    const int32_t* kv_lengths;     // [sequences]
    const int32_t* block_tables;   // [sequences, table_stride]
    int64_t table_stride;
    int64_t sequences;
    const void* query;             // [tokens, query_heads, head_dim]
    int64_t query_token_stride;
    int64_t query_head_stride;
    const void* pages;             // [pages, 2, page_size, kv_heads, head_dim], each page contiguous
    int64_t page_stride;           // from one page to the next
    void* output;                  // [tokens, query_heads, head_dim], contiguous
    int32_t query_heads, kv_heads, head_dim, page_size;
    int32_t window_left;           // -1: no window
    int32_t dtype;
    float scale;
    float soft_cap;                // 0: no cap
    const float* sinks;            // [query_heads] or null
};

// Writes new keys and values to their slots.
struct QuireAppend {
    const void* key;               // [tokens, kv_heads, head_dim]
    const void* value;
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    const int64_t* slots;          // [tokens], page * page_size + offset
    void* pages;
    int64_t page_stride;
    int64_t tokens;
    int32_t kv_heads, head_dim, page_size, dtype;
};

// Rotates queries and keys by their positions, in place, and normalizes them before if a weight is given:
//   x = x / rms(x) * weight;  x = x * cos + rotate_half(x) * sin
struct QuireRotate {
    void* heads;                   // [tokens, query_heads + kv_heads, head_dim]: queries, then keys
    int64_t token_stride;
    const void* cosine;            // [positions, rotary_dim], of `dtype`
    const void* sine;
    int64_t table_stride;
    const int64_t* positions;      // [tokens], rows of the tables; null if each token has a row of its own
    const void* query_norm;        // [head_dim] or null
    const void* key_norm;
    int64_t tokens;
    int32_t query_heads, kv_heads, head_dim, rotary_dim, dtype;
    float epsilon;
};

// x / sqrt(mean(x^2) + epsilon) * weight, row by row.
struct QuireNorm {
    const void* input;
    void* output;
    const void* weight;            // [size]
    int64_t input_stride, output_stride, rows, size;
    int32_t dtype;
    float epsilon;
};

// Computes input @ weight^T + bias (+ residual), or applies `gate` to it.
struct QuireLinear {
    const void* input;             // [rows, inputs]
    const void* weight;            // packed by quire_pack: [panels, words, PANEL] words of 32 bits
    const float* bias;             // [panels * PANEL] in the order of the packed columns, or null
    const void* residual;          // [rows, outputs] or null
    void* output;                  // [rows, outputs]
    int64_t input_stride, residual_stride, output_stride;
    int64_t rows, inputs, outputs;
    int32_t gate, dtype;
};

// Packs rows of a weight into columns of panels: row i becomes column `offset + (first + i) % columns` of panel
// `(first + i) / columns`.
struct QuirePack {
    const void* weight;            // [rows, inputs]
    void* packed;                  // as for QuireLinear
    int64_t weight_stride, rows, inputs, first, offset, columns;
    int32_t dtype;
};

// Copies rows of a packed weight: the embeddings of a model whose head and embedding share a weight.
struct QuireEmbed {
    const int64_t* ids;            // [tokens]
    const void* packed;            // [panels, words, PANEL] words of 32 bits
    void* output;                  // [tokens, words]
    int64_t tokens, words;
};

// Computes a convolution over the last `kernel` inputs of each channel, with the activation `gate`. Each sequence continues
// from its state, which is updated in place.
struct QuireConvolve {
    const void* input;             // [tokens, channels]
    const float* weight;           // [kernel, channels], the oldest input first
    const float* bias;             // [channels] or null
    void* states;                  // [sequences, kernel, channels], the last inputs
    void* output;                  // [tokens, channels], contiguous
    const int64_t* starts;         // [sequences + 1], tokens
    int64_t input_stride, sequences, channels, kernel;
    int32_t gate, dtype;
};

// Computes the scan of Mamba 2 (Dao and Gu, 2024). Each sequence continues from its state, which is updated in place.
struct QuireScan {
    const void* input;             // [tokens, heads, head_dim]
    const void* b;                 // [tokens, groups, state_size]
    const void* c;
    const float* steps;            // [tokens, heads], contiguous
    const float* decay;            // [heads], negative
    const float* skip;             // [heads] or null
    float* states;                 // [sequences, heads, head_dim, state_size]
    float* output;                 // [tokens, heads, head_dim], contiguous
    const int64_t* starts;         // [sequences + 1], tokens
    int64_t input_stride, b_stride, c_stride, sequences;
    int32_t heads, head_dim, groups, state_size, dtype;
};

// A packed weight for quire_linear.
struct QuirePacked {
    const void* weight;
    const float* bias;             // or null
    int64_t inputs, outputs;
    int32_t gate;
};

// One layer of a decoder: x = x + attention(norm(x)); x = x + mlp(norm(x)).
struct QuireLayer {
    struct QuirePacked qkv, output, gate_up, down;
    const void* attention_norm;
    const void* mlp_norm;
    const void* query_norm;        // or null
    const void* key_norm;
    void* pages;
    int64_t page_stride;
    const struct QuireAttend* attend;  // the batch for this kind of layer; the call fills in its tensors
    const int64_t* slots;          // [tokens], or null if another layer writes these pages
    const float* sinks;            // [query_heads] or null
    float attention_epsilon, mlp_epsilon, head_epsilon;
};

// Computes all layers of a decoder on the hidden states, in place. The other buffers hold results between kernels.
// If only some tokens are kept, the last layer computes attention for all tokens, and everything after attention only
// for the kept tokens. The results of the kept tokens are then the first rows of `hidden`.
struct QuireDecoder {
    const struct QuireLayer* layers;
    int64_t layer_count;
    void* hidden;                  // [tokens, hidden_size]
    void* normed;                  // [tokens, hidden_size]
    void* qkv;                     // [tokens, query_heads + 2 * kv_heads, head_dim]
    void* attended;                // [tokens, query_heads, head_dim]
    void* gated;                   // [tokens, outputs of gate_up]
    const void* cosine;            // as for QuireRotate
    const void* sine;
    const int64_t* positions;
    const int64_t* kept;           // [kept_count], tokens in rising order; null: all
    int64_t table_stride, tokens, kept_count, hidden_size;
    int32_t query_heads, kv_heads, head_dim, rotary_dim, dtype;
};

// Finds the first largest logit of each row, and whether this logit is a number within the bound. NaN counts as larger
// than all numbers.
struct QuireGreedy {
    const float* logits;           // [rows, vocabulary]
    int64_t* tokens;               // [rows]
    uint8_t* are_bounded;          // [rows], 0 or 1
    int64_t stride, rows, vocabulary;
    float bound;
};

// Draws a token for each row. With temperature 0, the token is the greedy choice. Otherwise, it is the first token
// whose cumulative probability in the softmax of logits / temperature exceeds `uniform`.
struct QuireDraw {
    const float* logits;           // [rows, vocabulary]
    const float* temperatures;     // [rows]
    const double* uniforms;        // [rows], in [0, 1); not read if the temperature is 0
    int64_t* tokens;               // [rows]
    int64_t stride, rows, vocabulary;
};

enum { QUIRE_PANEL = 64 };         // columns per panel of a packed weight

QUIRE_EXPORT const char* quire_instruction_sets(void);        // the sets that this CPU has, best first, separated by commas
QUIRE_EXPORT int quire_use(const char* instruction_set);      // 0, or -1 if this CPU does not have the set
QUIRE_EXPORT void quire_threads(void* gomp_parallel, int count);  // OpenMP's entry point in this process, or null

QUIRE_EXPORT void quire_attend(const struct QuireAttend*);
QUIRE_EXPORT void quire_append(const struct QuireAppend*);
QUIRE_EXPORT void quire_rotate(const struct QuireRotate*);
QUIRE_EXPORT void quire_norm(const struct QuireNorm*);
QUIRE_EXPORT void quire_linear(const struct QuireLinear*);
QUIRE_EXPORT void quire_pack(const struct QuirePack*);
QUIRE_EXPORT void quire_embed(const struct QuireEmbed*);
QUIRE_EXPORT void quire_convolve(const struct QuireConvolve*);
QUIRE_EXPORT void quire_scan(const struct QuireScan*);
QUIRE_EXPORT void quire_decoder(const struct QuireDecoder*);
QUIRE_EXPORT void quire_draw(const struct QuireDraw*);
QUIRE_EXPORT void quire_greedy(const struct QuireGreedy*);
