// Constants of published mHC models: what an operator's arguments must be to compute what they do.
#pragma once

#include <cstdint>
#include <string_view>

#include "ehc/mhc/sinkhorn.h"

namespace ehc::mhc {

// Arguments of the mixes: RMS norm of the projection, split, Sinkhorn.
struct MixPreset {
  double norm_eps = 1e-6;
  double pre_eps = 1e-6;
  double post_mult = 2;
  int64_t repeat = 20;
  double sinkhorn_eps = 1e-6;
  SinkhornConvention convention = SinkhornConvention::deepseek;

  friend constexpr bool operator==(const MixPreset&, const MixPreset&) = default;
};

// For new models, of the public kernels' tests, and of the mHC paper, which has no eps but that of
// its RMS norm: Sinkhorn in logarithms is finite without one.
inline constexpr MixPreset kTrainMix{};
inline constexpr MixPreset kRepositoryMix{.post_mult = 1, .repeat = 10};
inline constexpr MixPreset kPaperMix{
    .norm_eps = 1e-20, .pre_eps = 0, .sinkhorn_eps = 0, .convention = SinkhornConvention::log};

// How the streams become one again behind the last layer.
enum class FinalCollapse {
  unpublished,
  learned_head,  // mixes of their own: head_mix_fwd
  last_pre_mix,  // the pre mix that the last sublayer made of its streams: pre_apply_fwd
};

struct ModelPreset {
  std::string_view name;
  int64_t streams = 4;       // n
  int64_t width = 0;         // d
  int64_t layers = 0;        // of an attention and a feed-forward sublayer each; 0: unpublished
  int64_t draft_blocks = 0;  // behind them, for speculative decoding
  MixPreset mix{};
  FinalCollapse collapse = FinalCollapse::unpublished;
  // Collapse with the pre mix of the sublayer before (seam_single_pass) instead of the newest one.
  bool is_single_pass = false;
};

inline constexpr ModelPreset kModels[] = {
    {.name = "deepseek-v4-flash",
     .width = 4096,
     .layers = 43,
     .collapse = FinalCollapse::learned_head},
    {.name = "deepseek-v4-pro", .width = 7168, .collapse = FinalCollapse::learned_head},
    {.name = "deepseek-v4.1-flash",
     .width = 5120,
     .layers = 40,
     .draft_blocks = 3,
     .mix = {.norm_eps = 1e-20},
     .collapse = FinalCollapse::last_pre_mix,
     .is_single_pass = true},
    {.name = "glm-5.3-flash", .width = 4096, .layers = 45, .mix = {.norm_eps = 1e-5}},
    {.name = "paper-3b", .width = 1280, .mix = kPaperMix},
    {.name = "paper-9b", .width = 1920, .mix = kPaperMix},
    {.name = "paper-27b", .width = 2560, .mix = kPaperMix},
};

// Null when the name is unknown.
constexpr const ModelPreset* find_model(std::string_view name) {
  for (const ModelPreset& model : kModels) {
    if (model.name == name) return &model;
  }
  return nullptr;
}

}  // namespace ehc::mhc
