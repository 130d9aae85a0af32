// The kernels that a recorded program can call; each is described where it is defined.
#pragma once
#include "abi.h"

PORTER_EXPORT void porter_rms_norm(void* out, void* total, const void* x, const void* residual, const void* weight,
                                   const void* gate, int64_t rows, int64_t size, int64_t x_stride,
                                   int64_t residual_stride, int64_t gate_stride, double eps, double offset,
                                   int32_t dtypes, int32_t threads);
PORTER_EXPORT void porter_swiglu(void* out, const void* gate_up, int64_t rows, int64_t size, int64_t stride,
                                 int32_t dtype, int32_t threads);
PORTER_EXPORT void porter_rope(void* query_out, void* key_out, const void* query, const void* key, const void* cos,
                               const void* sin, const int64_t* shape, int32_t style, int32_t dtype,
                               int32_t cos_dtype, int32_t threads);
PORTER_EXPORT void porter_linear(void* out, const void* x, const void* weight, const float* weight_scale,
                                 const void* bias, int64_t m, int64_t n, int64_t k, int64_t x_stride,
                                 int64_t weight_stride, int64_t few, int32_t dtype, int32_t weight_dtype,
                                 int32_t threads);
PORTER_EXPORT void porter_linear_w8a8(void* out, const void* x, const int8_t* weight, const float* weight_scale,
                                      const void* bias, int64_t m, int64_t n, int64_t k, int64_t x_stride,
                                      int64_t weight_stride, int64_t few, int32_t dtype, int32_t threads);
PORTER_EXPORT void porter_attention(void* out, const void* query, const void* key, const void* value, const void* mask,
                                    const int64_t* shape, const int64_t* strides, double scaling, int32_t dtype,
                                    int32_t mask_dtype, int32_t threads);
PORTER_EXPORT void porter_mla(void* out, const void* query_nope, const void* query_rope, const void* latent,
                              const void* key_rope, const void* weight, const void* mask, const int64_t* shape,
                              const int64_t* strides, double scaling, int32_t dtype, int32_t mask_dtype,
                              int32_t threads);
PORTER_EXPORT void porter_experts(void* out, const void* hidden, const int64_t* index, const void* weights,
                                  const void* gate_up, const float* gate_up_scale, const void* down,
                                  const float* down_scale, const int64_t* shape, int32_t quantize_activations,
                                  int32_t dtype, int32_t router_dtype, int32_t weight_dtype, int32_t threads);
PORTER_EXPORT void porter_router(void* logits, void* weights, int64_t* indices, const void* hidden, const void* weight,
                                 const float* bias, const int64_t* shape, double factor, int32_t dtype,
                                 int32_t weight_dtype, int32_t out_dtype, int32_t threads);
PORTER_EXPORT void porter_sigmoid_gate(void* out, const void* x, const void* gate, int64_t rows, int64_t size,
                                       int64_t x_stride, int64_t gate_stride, int32_t one_gate, int32_t dtype,
                                       int32_t threads);
