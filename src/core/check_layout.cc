// The front door's last step: where tensors lie in memory. Devices, pointers, alignment, strides,
// leading dimensions that flatten, and which tensors may overlap.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "core/bind.h"

namespace ehc {

namespace {

bool multiply(int64_t a, int64_t b, int64_t& out) { return !__builtin_mul_overflow(a, b, &out); }
bool add(int64_t a, int64_t b, int64_t& out) { return !__builtin_add_overflow(a, b, &out); }

bool is_empty(const Tensor& t) {
  return std::any_of(t.shape, t.shape + t.rank, [](int64_t dim) { return dim == 0; });
}

// The leading dimension whose stride does not fit those behind it, or -1. With a dimension of 0
// strides mean nothing; without one, binding T has shown that no product of the others overflows.
int unflattenable_dimension(const Tensor& t, int lead) {
  int64_t tokens = 1;
  int64_t stride = 0;
  for (int k = lead - 1; k >= 0 && !is_empty(t); --k) {
    if (t.shape[k] == 1) continue;
    int64_t expected = 0;
    if (tokens == 1) {
      stride = t.stride[k];
    } else if (!multiply(stride, tokens, expected) || t.stride[k] != expected) {
      return k;
    }
    tokens *= t.shape[k];
  }
  return -1;
}

// Elements from the first to the last of axes `first_axis` on.
int64_t span_of(const Tensor& t, int first_axis) {
  int64_t last = 0;
  for (int k = first_axis; k < t.rank; ++k) last += (t.shape[k] - 1) * t.stride[k];
  return last + 1;
}

// For tensors whose extents meet.
bool share_elements(const Tensor& a, const Tensor& b) {
  // Interleaved rows of one buffer (a packed kv seen as key and value) do not overlap.
  if (a.rank == 0 || b.rank == 0) return true;
  const auto period = static_cast<uintptr_t>(a.stride[0]) * size_of(a.dtype);
  if (period == 0 || period != static_cast<uintptr_t>(b.stride[0]) * size_of(b.dtype)) return true;
  const auto row = [](const Tensor& t) {
    return static_cast<uintptr_t>(span_of(t, 1)) * size_of(t.dtype);
  };
  const auto address_a = reinterpret_cast<uintptr_t>(a.data);
  const auto address_b = reinterpret_cast<uintptr_t>(b.data);
  const uintptr_t low = std::min(address_a, address_b);
  const uintptr_t at_a = (address_a - low) % period;
  const uintptr_t at_b = (address_b - low) % period;
  const uintptr_t end_a = at_a + row(a);
  const uintptr_t end_b = at_b + row(b);
  return !(end_a <= at_b && end_b <= period) && !(end_b <= at_a && end_a <= period);
}

bool same_view(const Tensor& a, const Tensor& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int k = 0; k < a.rank; ++k) {
    if (a.shape[k] != b.shape[k] || (a.shape[k] > 1 && a.stride[k] != b.stride[k])) return false;
  }
  return true;
}

// Do the axes of an output, by ascending stride, each step over the ones before?
bool elements_are_distinct(const Tensor& t, int& culprit) {
  bool used[kMaxRank] = {};
  int64_t reach = 1;
  for (int step = 0; step < t.rank; ++step) {
    int next = -1;
    for (int k = 0; k < t.rank; ++k) {
      if (!used[k] && t.shape[k] > 1 && (next < 0 || t.stride[k] < t.stride[next])) next = k;
    }
    if (next < 0) break;
    used[next] = true;
    culprit = next;
    if (t.stride[next] < reach) return false;
    reach = (t.shape[next] - 1) * t.stride[next] + reach;
  }
  return true;
}

// Returns span_of(t, 0), which then does not overflow. `t` is not empty. refuse(expected, got)
// throws.
template <class Refuse>
int64_t check_strides(const TensorSpec& spec, const Tensor& t, const Refuse& refuse) {
  // Texts are made on failure only; `k` < 0: without the dimension.
  const auto bad = [&](const char* expected, const char* prefix, int64_t stride, int k) {
    refuse(expected,
           prefix + std::to_string(stride) + (k < 0 ? "" : " at dimension " + std::to_string(k)));
  };
  int64_t last = 0;
  bool nested = true;  // each axis steps over all that follow it: the usual case
  for (int k = t.rank - 1; k >= 0; --k) {
    if (t.stride[k] < 0) bad("strides >= 0", "", t.stride[k], k);
    if (t.shape[k] == 1) continue;
    if (k == t.rank - 1 && t.stride[k] != 1) {
      bad("stride 1 in the last dimension", "", t.stride[k], -1);
    }
    if (spec.is_packed && t.stride[k] != last + 1) {
      bad("a contiguous tensor", "stride ", t.stride[k], k);
    }
    nested = nested && t.stride[k] > last;
    int64_t span = 0;
    if (!multiply(t.shape[k] - 1, t.stride[k], span) || !add(last, span, last) ||
        last > INT64_MAX / 16) {
      bad("an extent below 2^59 elements", "stride ", t.stride[k], k);
    }
  }
  int culprit = 0;
  if (spec.is_output && !nested && !elements_are_distinct(t, culprit)) {
    bad("an output without overlapping elements", "stride ", t.stride[culprit], culprit);
  }
  return last + 1;
}

std::string place_text(Device device, int index) {
  if (device == Device::cpu) return "cpu";
  if (device == Device::cuda) return "cuda:" + std::to_string(index);
  return "unknown device " + std::to_string(static_cast<int>(device));
}

}  // namespace

Tensor flattened(const Tensor& t, int lead) {
  if (lead == 1) return t;
  Tensor flat = t;
  flat.rank = static_cast<int8_t>(t.rank - lead + 1);
  flat.shape[0] = is_empty(t) ? 0 : 1;
  flat.stride[0] = 0;
  for (int k = lead - 1; k >= 0; --k) {
    if (flat.shape[0] == 1) flat.stride[0] = t.stride[k];
    flat.shape[0] *= t.shape[k];
  }
  for (int k = 1; k < flat.rank; ++k) {
    flat.shape[k] = t.shape[k + lead - 1];
    flat.stride[k] = t.stride[k + lead - 1];
  }
  return flat;
}

void FrontDoor::check_leading_dimensions(Place place) const {
  const Tensor& t = at(place);
  const int k = unflattenable_dimension(t, bound_.lead_rank);
  if (k < 0) return;
  refuse(place, "leading dimensions that flatten to one stride",
         "stride " + std::to_string(t.stride[k]) + " at dimension " + std::to_string(k));
}

FrontDoor::Extent FrontDoor::extent_of(Place place) const {
  const Tensor& t = at(place);
  const auto begin = reinterpret_cast<uintptr_t>(t.data);
  if (is_empty(t)) return {begin, begin};
  return {begin, begin + static_cast<uintptr_t>(span_of(t, 0)) * size_of(t.dtype)};
}

[[gnu::always_inline]] inline FrontDoor::Extent FrontDoor::check_memory(Place place, Device device,
                                                                        int device_index) const {
  const Tensor& t = at(place);
  if (t.device != device || (device == Device::cuda && t.device_index != device_index)) {
    refuse(place, "memory on " + place_text(device, device_index),
           place_text(t.device, t.device_index));
  }
  const auto begin = reinterpret_cast<uintptr_t>(t.data);
  if (is_empty(t)) return {begin, begin};
  if (t.data == nullptr) refuse(place, "a pointer to data", "null");
  const size_t size = size_of(t.dtype);
  if ((begin & (size - 1)) != 0) {
    refuse(place, "an address that is a multiple of " + std::to_string(size),
           "address mod " + std::to_string(size) + " = " + std::to_string(begin % size));
  }
  const int64_t span = check_strides(
      schema_.tensors[place.index], t,
      [&](const char* expected, const std::string& got) { refuse(place, expected, got); });
  return {begin, begin + static_cast<uintptr_t>(span) * size};
}

void FrontDoor::check_layout(Device device, int device_index) {
  const bool flattens = schema_.flattens && bound_.lead_rank > 1;
  if (flattens) {
    std::memcpy(args_.flattened, args_.params, schema_.params_size);
    params_ = args_.flattened;
    look_up_tensors(args_.flattened);
  }
  Extent extents[kMaxTensors];
  TensorSet live = 0;
  for (TensorSet rest = present_; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<size_t>(std::countr_zero(rest));
    const bool leads = flattens && schema_.tensors[i].shape.leads_with_tokens();
    for (size_t e = 0; e < count(i); ++e) {
      if (leads) check_leading_dimensions({i, e});
      if (leads && !is_list(i)) *tensors_[i] = flattened(*tensors_[i], bound_.lead_rank);
      extents[i] = check_memory({i, e}, device, device_index);
    }
    if (is_list(i) || extents[i].end > extents[i].begin) live |= rest & -rest;
  }
  check_overlaps(live, extents);
}

// Outputs lie apart from all inputs and from each other, but for the views that may be the same.
// `extents` are those of entries that are no lists.
void FrontDoor::check_overlaps(TensorSet live, const Extent* extents) const {
  TensorSet others = live;
  for (TensorSet outputs = live & ~schema_.inputs; outputs != 0; outputs &= outputs - 1) {
    const auto i = static_cast<size_t>(std::countr_zero(outputs));
    others &= ~(outputs & -outputs);  // outputs pair up once
    for (size_t e = 0; e < count(i); ++e) {
      const Extent mine = is_list(i) ? extent_of({i, e}) : extents[i];
      for (size_t later = e + 1; later < count(i); ++later) {
        check_overlap({i, e}, mine, {i, later}, extent_of({i, later}));
      }
      for (TensorSet rest = others & ~schema_.lists; rest != 0; rest &= rest - 1) {
        const auto k = static_cast<size_t>(std::countr_zero(rest));
        check_overlap({i, e}, mine, {k}, extents[k]);
      }
      for (TensorSet rest = others & schema_.lists; rest != 0; rest &= rest - 1) {
        const auto k = static_cast<size_t>(std::countr_zero(rest));
        for (size_t f = 0; f < count(k); ++f)
          check_overlap({i, e}, mine, {k, f}, extent_of({k, f}));
      }
    }
  }
}

inline void FrontDoor::check_overlap(Place output, const Extent& mine, Place other,
                                     const Extent& theirs) const {
  if (mine.end <= theirs.begin || theirs.end <= mine.begin) return;
  refuse_shared_elements(output, mine, other, theirs);
}

// For extents that meet.
void FrontDoor::refuse_shared_elements(Place output, const Extent& mine, Place other,
                                       const Extent& theirs) const {
  if (mine.end == mine.begin || theirs.end == theirs.begin) return;
  if (!share_elements(at(output), at(other))) return;
  const bool allowed = schema_.tensors[output.index].alias_index == static_cast<int>(other.index);
  if (allowed && same_view(at(output), at(other))) return;
  refuse(
      output,
      "memory apart from '" + name_of(other) + "'" + (allowed ? " or exactly the same view" : ""),
      "overlapping memory");
}

void FrontDoor::check_workspace(const void* data, size_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  for (TensorSet rest = present_; rest != 0; rest &= rest - 1) {
    const auto i = static_cast<size_t>(std::countr_zero(rest));
    for (size_t e = 0; e < count(i); ++e) {
      const Extent tensor = extent_of({i, e});
      if (tensor.begin == tensor.end || tensor.end <= begin || tensor.begin >= begin + bytes) {
        continue;
      }
      fail(schema_, "workspace: expected memory apart from '" + name_of({i, e}) +
                        "', got overlapping memory");
    }
  }
}

}  // namespace ehc
