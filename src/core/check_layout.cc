// The front door's last step: where tensors lie in memory. Devices, pointers, alignment, strides,
// leading dimensions that flatten, and which tensors may overlap.
#include <algorithm>
#include <cstdint>

#include "core/bind.h"

namespace ehc {

namespace {

bool multiply(int64_t a, int64_t b, int64_t& out) { return !__builtin_mul_overflow(a, b, &out); }
bool add(int64_t a, int64_t b, int64_t& out) { return !__builtin_add_overflow(a, b, &out); }

// The flattened view of a tensor whose leading dimensions stand for T.
void flatten(const Schema& schema, const TensorSpec& spec, Tensor& t, int lead) {
  if (lead == 1) return;
  Tensor flat = t;
  // With a dimension of 0 strides mean nothing; without one, binding T has shown that no product of
  // the others overflows.
  const bool empty = std::any_of(t.shape, t.shape + lead, [](int64_t dim) { return dim == 0; });
  int64_t tokens = empty ? 0 : 1;
  int64_t stride = 0;
  for (int k = lead - 1; k >= 0 && !empty; --k) {
    if (t.shape[k] != 1) {
      int64_t expected = 0;
      if (tokens == 1) {
        stride = t.stride[k];
      } else if (!multiply(stride, tokens, expected) || t.stride[k] != expected) {
        fail_tensor(schema, spec.name, "leading dimensions that flatten to one stride",
                    "stride " + std::to_string(t.stride[k]) + " at dimension " + std::to_string(k));
      }
    }
    tokens *= t.shape[k];
  }
  flat.shape[0] = tokens;
  flat.stride[0] = stride;
  flat.rank = static_cast<int8_t>(t.rank - lead + 1);
  for (int k = 1; k < flat.rank; ++k) {
    flat.shape[k] = t.shape[k + lead - 1];
    flat.stride[k] = t.stride[k + lead - 1];
  }
  t = flat;
}

// Bytes [begin, end) that a tensor touches.
struct Extent {
  uintptr_t begin;
  uintptr_t end;
};
Extent extent_of(const Tensor& t, int first_axis) {
  int64_t last = 0;
  for (int k = first_axis; k < t.rank; ++k) last += (t.shape[k] - 1) * t.stride[k];
  const auto begin = reinterpret_cast<uintptr_t>(t.data);
  return {begin, begin + static_cast<uintptr_t>(last + 1) * size_of(t.dtype)};
}

// For tensors whose extents meet.
bool share_elements(const Tensor& a, const Tensor& b) {
  // Interleaved rows of one buffer (a packed kv seen as key and value) do not overlap.
  if (a.rank == 0 || b.rank == 0) return true;
  const auto period = static_cast<uintptr_t>(a.stride[0]) * size_of(a.dtype);
  if (period == 0 || period != static_cast<uintptr_t>(b.stride[0]) * size_of(b.dtype)) return true;
  const Extent ia = extent_of(a, 1);
  const Extent ib = extent_of(b, 1);
  const uintptr_t low = ia.begin < ib.begin ? ia.begin : ib.begin;
  const uintptr_t at_a = (ia.begin - low) % period;
  const uintptr_t at_b = (ib.begin - low) % period;
  const uintptr_t end_a = at_a + (ia.end - ia.begin);
  const uintptr_t end_b = at_b + (ib.end - ib.begin);
  return !(end_a <= at_b && end_b <= period) && !(end_b <= at_a && end_a <= period);
}

bool same_view(const Tensor& a, const Tensor& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int k = 0; k < a.rank; ++k) {
    if (a.shape[k] != b.shape[k] || (a.shape[k] > 1 && a.stride[k] != b.stride[k])) return false;
  }
  return true;
}

void check_strides(const Schema& schema, const TensorSpec& spec, const Tensor& t) {
  // Texts are made on failure only; `k` < 0: without the dimension.
  const auto bad = [&](const char* expected, const char* prefix, int64_t stride, int k) {
    fail_tensor(
        schema, spec.name, expected,
        prefix + std::to_string(stride) + (k < 0 ? "" : " at dimension " + std::to_string(k)));
  };
  int64_t extent = 1;
  int64_t last = 0;
  for (int k = t.rank - 1; k >= 0; --k) {
    int64_t span = 0;
    if (t.stride[k] < 0) bad("strides >= 0", "", t.stride[k], k);
    if (!multiply(t.shape[k] - 1, t.stride[k], span) || !add(last, span, last) ||
        last > INT64_MAX / 16) {
      bad("an extent below 2^59 elements", "stride ", t.stride[k], k);
    }
    if (t.shape[k] == 1) continue;
    if (k == t.rank - 1 && t.stride[k] != 1) {
      bad("stride 1 in the last dimension", "", t.stride[k], -1);
    }
    if (!spec.is_packed) continue;
    if (t.stride[k] != extent) bad("a contiguous tensor", "stride ", t.stride[k], k);
    extent *= t.shape[k];
  }
  if (!spec.is_output) return;
  // Elements of an output must be distinct: each axis, by ascending stride, steps over the last.
  bool used[kMaxRank] = {};
  int64_t reach = 1;
  for (int step = 0; step < t.rank; ++step) {
    int next = -1;
    for (int k = 0; k < t.rank; ++k) {
      if (!used[k] && t.shape[k] > 1 && (next < 0 || t.stride[k] < t.stride[next])) next = k;
    }
    if (next < 0) break;
    used[next] = true;
    if (t.stride[next] < reach) {
      bad("an output without overlapping elements", "stride ", t.stride[next], next);
    }
    reach = (t.shape[next] - 1) * t.stride[next] + reach;
  }
}

}  // namespace

void check_layout(const Schema& schema, const Arguments& args, const Bound& bound, Device device,
                  int device_index) {
  struct Live {
    size_t index;
    const Tensor* tensor;
    Extent extent;
    bool is_output;
  };
  Live live[kMaxTensors];
  size_t count = 0;
  for (size_t i = 0; i < schema.tensors.size(); ++i) {
    const TensorSpec& spec = schema.tensors[i];
    Tensor& t = spec.access(args.params);
    if (!t.present()) continue;
    if (t.device != device || (device == Device::cuda && t.device_index != device_index)) {
      const auto name = [](Device d, int index) {
        return d == Device::cpu ? std::string("cpu") : "cuda:" + std::to_string(index);
      };
      fail_tensor(schema, spec.name, "memory on " + name(device, device_index),
                  name(t.device, t.device_index));
    }
    if (spec.shape.leads_with_tokens() && schema.flattens)
      flatten(schema, spec, t, bound.lead_rank);
    if (t.numel() == 0) continue;
    if (t.data == nullptr) fail_tensor(schema, spec.name, "a pointer to data", "null");
    if ((reinterpret_cast<uintptr_t>(t.data) & (size_of(t.dtype) - 1)) != 0) {
      fail_tensor(schema, spec.name,
                  "an address that is a multiple of " + std::to_string(size_of(t.dtype)),
                  "address mod " + std::to_string(size_of(t.dtype)) + " = " +
                      std::to_string(reinterpret_cast<uintptr_t>(t.data) % size_of(t.dtype)));
    }
    check_strides(schema, spec, t);
    Live& entry = live[count++];  // field by field: a copied aggregate stalls on its own stores
    entry.index = i;
    entry.tensor = &t;
    entry.extent = extent_of(t, 0);
    entry.is_output = spec.is_output;
  }
  for (size_t i = 0; i < count; ++i) {
    const Live& out = live[i];
    if (!out.is_output) continue;
    for (size_t k = 0; k < count; ++k) {
      const Live& other = live[k];
      if (out.extent.end <= other.extent.begin || other.extent.end <= out.extent.begin) continue;
      if (other.is_output && k <= i) continue;  // outputs pair up once
      if (!share_elements(*out.tensor, *other.tensor)) continue;
      const TensorSpec& spec = schema.tensors[out.index];
      const bool allowed = spec.alias_index == static_cast<int>(other.index);
      if (allowed && same_view(*out.tensor, *other.tensor)) continue;
      fail_tensor(schema, spec.name,
                  "memory apart from '" + std::string(schema.tensors[other.index].name) + "'" +
                      (allowed ? " or exactly the same view" : ""),
                  "overlapping memory");
    }
  }
}

}  // namespace ehc
