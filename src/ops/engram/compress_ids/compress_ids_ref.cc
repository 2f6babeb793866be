// The formula. It is a plain gather from a small table, so there is no other CPU kernel.
#include "ops/engram/compress_ids/compress_ids_math.h"

namespace ehc::engram {

namespace {

template <class Id>
void compress(const CompressIdsArgs& a, int64_t begin, int64_t end) {
  const auto* ids = static_cast<const Id*>(a.ids);
  for (int64_t t = begin; t < end; ++t) {
    a.compressed[t] = compressed_id(a, ids[t]);
  }
}

}  // namespace

void compress_ids_reference(const CompressIdsArgs& a, int64_t begin, int64_t end) {
  a.ids_are_64 ? compress<int64_t>(a, begin, end) : compress<int32_t>(a, begin, end);
}

}  // namespace ehc::engram
