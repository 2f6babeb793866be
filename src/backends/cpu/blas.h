// The one place that knows of a BLAS library. Callers have a product of their own for when it is
// not built in or not fit for use here.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ehc/context.h"

namespace ehc::blas {

// c[m, n] (+)= a[m, k] * b[n, k]^T in fp32, row-major, strides in elements; m, n, k and strides in
// 1..2^31-1. An operand can also lie in memory as [k, m] or [k, n]. How the library orders a sum is
// its own affair, but it is one chain at worst.
struct Product {
  const float* a;
  const float* b;
  float* c;
  int64_t a_stride;
  int64_t b_stride;
  int64_t c_stride;
  int64_t rows;             // m
  int64_t columns;          // n
  int64_t depth;            // k
  bool accumulate;          // add to c, else c is not read
  bool a_by_depth = false;  // a is [k, m]
  bool b_by_depth = false;  // b is [k, n]
};

// Why OpenBLAS must not be used on this machine, or empty. It is tried once on small products whose
// results are exact integers: old builds compute wrong ones on processors that they do not know.
const std::string& openblas_fault();

// Why another product is the better choice, or empty: on a processor that it does not know, it
// takes kernels for narrower vectors than ours.
const std::string& openblas_weakness();

// Why a call on this context does not take OpenBLAS, or empty. Its weakness is no reason when the
// implementation "cpu.openblas" was asked for by name.
std::string_view refuse_openblas(const Context& context);

// May be called from several threads at once; where the library was built without threads, the
// calls wait for each other. Touches no setting of the library: one that has threads of its own
// uses as many as the process gave it. Precondition: no fault.
void multiply_openblas(const Product& product);

}  // namespace ehc::blas
