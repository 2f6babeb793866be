#include "ehc/tensor.h"

namespace ehc {

Tensor::Tensor(const void* data_in, DType dtype_in, const int64_t* shape_in, int rank_in,
               Device device_in, int device_index_in)
    : data(const_cast<void*>(data_in)),
      dtype(dtype_in),
      device(device_in),
      device_index(static_cast<int8_t>(device_index_in)),
      rank(static_cast<int8_t>(rank_in < 0 || rank_in > kMaxRank ? kMaxRank + 1 : rank_in)) {
  if (rank > kMaxRank) return;  // refused, with this rank, by every operator
  int64_t step = 1;
  for (int k = rank - 1; k >= 0; --k) {
    shape[k] = shape_in[k];
    stride[k] = step;
    if (__builtin_mul_overflow(step, shape[k] > 1 ? shape[k] : 1, &step)) step = INT64_MAX;
  }
}

Tensor::Tensor(const void* data_in, DType dtype_in, std::initializer_list<int64_t> shape_in,
               Device device_in, int device_index_in)
    : Tensor(data_in, dtype_in, shape_in.begin(), static_cast<int>(shape_in.size()), device_in,
             device_index_in) {}

int64_t Tensor::numel() const {
  int64_t count = 1;
  bool overflow = false;
  for (int k = 0; k < rank; ++k) {
    if (shape[k] == 0) return 0;
    overflow = __builtin_mul_overflow(count, shape[k], &count) || overflow;
  }
  return overflow ? INT64_MAX : count;
}

bool Tensor::contiguous() const {
  int64_t step = 1;
  for (int k = rank - 1; k >= 0; --k) {
    if (shape[k] == 0) return true;
    if (shape[k] != 1 && stride[k] != step) return false;
    if (__builtin_mul_overflow(step, shape[k], &step)) return false;  // no such memory
  }
  return true;
}

Tensor Tensor::slice(int axis, int64_t begin, int64_t end) const {
  Tensor view = *this;
  view.shape[axis] = end - begin;
  view.data =
      static_cast<char*>(data) + begin * stride[axis] * static_cast<int64_t>(size_of(dtype));
  return view;
}

Tensor Tensor::select(int axis, int64_t index) const {
  Tensor view = slice(axis, index, index + 1);
  for (int k = axis; k + 1 < rank; ++k) {
    view.shape[k] = shape[k + 1];
    view.stride[k] = stride[k + 1];
  }
  --view.rank;
  view.shape[view.rank] = view.stride[view.rank] = 0;
  return view;
}

}  // namespace ehc
