// All layers of a decoder like Llama's in one call. It uses the kernels that are also called one by one, and runs without
// Python's interpreter.
#include "quire_cpu.h"

#include <string.h>

namespace {

void norm(const QuireDecoder& d, const void* weight, float epsilon, void* output) {
    const QuireNorm arguments{d.hidden, output,        weight,        d.hidden_size, d.hidden_size,
                              d.tokens, d.hidden_size, d.dtype, epsilon};
    quire_norm(&arguments);
}

// With `is_added`, the result is added to the hidden states in place.
void linear(const QuireDecoder& d, const QuirePacked& layer, const void* input, bool is_added, void* output) {
    const QuireLinear arguments{
        input,         layer.weight,  layer.bias,   is_added ? output : nullptr, output, layer.inputs, layer.outputs,
        layer.outputs, d.tokens,      layer.inputs, layer.outputs,               layer.gate, d.dtype};
    quire_linear(&arguments);
}

char* behind(void* base, int64_t elements, int32_t dtype) {
    return static_cast<char*>(base) + elements * (dtype == QUIRE_BFLOAT16 ? 2 : 4);
}

void attention(const QuireDecoder& d, const QuireLayer& layer) {
    const int32_t turned = d.query_heads + d.kv_heads;
    const int64_t row = layer.qkv.outputs;
    const QuireRotate rotate{d.qkv,    row,           d.cosine,   d.sine,     d.table_stride, d.positions, layer.query_norm, layer.key_norm,
                             d.tokens, d.query_heads, d.kv_heads, d.head_dim, d.rotary_dim,   d.dtype,          layer.head_epsilon};
    quire_rotate(&rotate);
    const void* key = behind(d.qkv, d.query_heads * d.head_dim, d.dtype);
    const void* value = behind(d.qkv, turned * d.head_dim, d.dtype);
    QuireAttend attend = *layer.attend;
    if (layer.slots) {
        const QuireAppend append{key,         value,   row,          d.head_dim,        row,      d.head_dim,
                                 layer.slots, layer.pages, layer.page_stride, d.tokens, d.kv_heads, d.head_dim,
                                 attend.page_size, d.dtype};
        quire_append(&append);
    }
    attend.query = d.qkv;
    attend.query_token_stride = row;
    attend.query_head_stride = d.head_dim;
    attend.pages = layer.pages;
    attend.page_stride = layer.page_stride;
    attend.output = d.attended;
    attend.sinks = layer.sinks;
    quire_attend(&attend);
}

// Moves the rows of the kept tokens to the front of a buffer.
void keep(const QuireDecoder& d, void* rows, int64_t size) {
    char* first = static_cast<char*>(rows);
    const int64_t bytes = behind(rows, size, d.dtype) - first;
    for (int64_t i = 0; i < d.kept_count; i++) memmove(first + i * bytes, first + d.kept[i] * bytes, bytes);
}

}  // namespace

// Copies word by word, which needs no particular instruction set.
void quire_embed(const QuireEmbed* arguments) {
    const QuireEmbed& a = *arguments;
    const uint32_t* packed = static_cast<const uint32_t*>(a.packed);
    uint32_t* output = static_cast<uint32_t*>(a.output);
    for (int64_t token = 0; token < a.tokens; token++, output += a.words) {
        const uint32_t* column = packed + a.ids[token] / QUIRE_PANEL * a.words * QUIRE_PANEL + a.ids[token] % QUIRE_PANEL;
        for (int64_t word = 0; word < a.words; word++) output[word] = column[word * QUIRE_PANEL];
    }
}

void quire_decoder(const QuireDecoder* decoder) {
    QuireDecoder d = *decoder;
    for (int64_t i = 0; i < d.layer_count; i++) {
        const QuireLayer& layer = d.layers[i];
        norm(d, layer.attention_norm, layer.attention_epsilon, d.normed);
        linear(d, layer.qkv, d.normed, false, d.qkv);
        attention(d, layer);
        if (d.kept && i + 1 == d.layer_count) {
            keep(d, d.hidden, d.hidden_size);
            keep(d, d.attended, layer.output.inputs);
            d.tokens = d.kept_count;
        }
        linear(d, layer.output, d.attended, true, d.hidden);
        norm(d, layer.mlp_norm, layer.mlp_epsilon, d.normed);
        linear(d, layer.gate_up, d.normed, false, d.gated);
        linear(d, layer.down, d.gated, true, d.hidden);
    }
}
