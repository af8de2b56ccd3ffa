// Functions of the C ABI that the core itself calls, too: products (api.cpp) and what lies between them (between_api.cpp).

#pragma once
#include "between.h"

NC_EXPORT int32_t nc_linear(const nc::Spec* spec, const uint8_t* data, int64_t stride, int64_t rows, const void* x, int32_t dtype,
                            int64_t x_stride, int64_t batch, const void* bias, int32_t bias_dtype, void* out, int64_t out_stride,
                            int32_t threads, int32_t isa);
NC_EXPORT int32_t nc_linear_tiles(const nc::Spec* spec, const uint8_t* data, int64_t stride, int64_t rows, const void* x, int32_t dtype,
                                  int64_t x_stride, int64_t batch, const void* bias, int32_t bias_dtype, void* out, int64_t out_stride,
                                  int32_t threads, int32_t isa);
NC_EXPORT int32_t nc_linear_matrix(const nc::Spec* spec, const uint8_t* data, int64_t stride, int64_t rows, const void* x, int32_t dtype,
                                   int64_t x_stride, int64_t batch, const void* bias, int32_t bias_dtype, void* out, int64_t out_stride,
                                   int32_t threads, int32_t isa);
NC_EXPORT int32_t nc_add_norm(int32_t dtype, int64_t rows, int64_t width, const void* x, int64_t x_stride, const void* delta,
                              int64_t delta_stride, const void* weight, float eps, void* total, void* out, int32_t isa);
NC_EXPORT int32_t nc_gate(int32_t dtype, int64_t rows, int64_t width, const void* gate, int64_t gate_stride, const void* up,
                          int64_t up_stride, void* out, int32_t isa);
NC_EXPORT int32_t nc_attend(int32_t dtype, const nc::CacheLayout* cache, const void* queries, const void* key, const void* value,
                            const int64_t* strides, const float* turns, const int64_t* places, void* keys, void* values, void* out,
                            int32_t threads, int32_t isa);
