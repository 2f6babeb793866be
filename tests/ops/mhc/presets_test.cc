#include "ehc/mhc/presets.h"

#include <gtest/gtest.h>

namespace ehc::mhc {
namespace {

// What all models with published code have in common.
void expect_published(const ModelPreset& model, double norm_eps) {
  EXPECT_EQ(model.streams, 4);
  EXPECT_EQ(model.mix.norm_eps, norm_eps);
  EXPECT_EQ(model.mix.pre_eps, 1e-6);
  EXPECT_EQ(model.mix.sinkhorn_eps, 1e-6);
  EXPECT_EQ(model.mix.post_mult, 2);
  EXPECT_EQ(model.mix.repeat, 20);
  EXPECT_EQ(model.mix.convention, SinkhornConvention::deepseek);
}

TEST(Presets, DeepseekV4Flash) {
  const ModelPreset* model = find_model("deepseek-v4-flash");
  ASSERT_NE(model, nullptr);
  expect_published(*model, 1e-6);
  EXPECT_EQ(model->width, 4096);
  EXPECT_EQ(model->layers, 43);
  EXPECT_EQ(model->draft_blocks, 0);
  EXPECT_EQ(model->collapse, FinalCollapse::learned_head);
  EXPECT_FALSE(model->is_single_pass);
}

TEST(Presets, DeepseekV4Pro) {
  const ModelPreset* model = find_model("deepseek-v4-pro");
  ASSERT_NE(model, nullptr);
  expect_published(*model, 1e-6);
  EXPECT_EQ(model->width, 7168);
  EXPECT_EQ(model->layers, 0) << "unpublished";
  EXPECT_EQ(model->collapse, FinalCollapse::learned_head);
  EXPECT_FALSE(model->is_single_pass);
}

TEST(Presets, DeepseekV41Flash) {
  const ModelPreset* model = find_model("deepseek-v4.1-flash");
  ASSERT_NE(model, nullptr);
  expect_published(*model, 1e-20);
  EXPECT_EQ(model->width, 5120);
  EXPECT_EQ(model->layers, 40);
  EXPECT_EQ(model->draft_blocks, 3);
  EXPECT_EQ(model->collapse, FinalCollapse::last_pre_mix);
  EXPECT_TRUE(model->is_single_pass);
}

TEST(Presets, Glm53Flash) {
  const ModelPreset* model = find_model("glm-5.3-flash");
  ASSERT_NE(model, nullptr);
  expect_published(*model, 1e-5);
  EXPECT_EQ(model->width, 4096);
  EXPECT_EQ(model->layers, 45);
  EXPECT_EQ(model->collapse, FinalCollapse::unpublished);
}

TEST(Presets, Paper) {
  constexpr std::pair<const char*, int64_t> kSizes[] = {
      {"paper-3b", 1280}, {"paper-9b", 1920}, {"paper-27b", 2560}};
  for (const auto& [name, width] : kSizes) {
    const ModelPreset* model = find_model(name);
    ASSERT_NE(model, nullptr) << name;
    EXPECT_EQ(model->streams, 4);
    EXPECT_EQ(model->width, width);
    EXPECT_EQ(model->mix, kPaperMix);
  }
  EXPECT_EQ(kPaperMix.norm_eps, 1e-20);
  EXPECT_EQ(kPaperMix.pre_eps, 0);
  EXPECT_EQ(kPaperMix.post_mult, 2);
  EXPECT_EQ(kPaperMix.repeat, 20);
  EXPECT_EQ(kPaperMix.sinkhorn_eps, 0);
  EXPECT_EQ(kPaperMix.convention, SinkhornConvention::log);
}

TEST(Presets, MixesOfTheContract) {
  EXPECT_EQ(kTrainMix, (MixPreset{1e-6, 1e-6, 2, 20, 1e-6, SinkhornConvention::deepseek}));
  EXPECT_EQ(kRepositoryMix, (MixPreset{1e-6, 1e-6, 1, 10, 1e-6, SinkhornConvention::deepseek}));
  EXPECT_EQ(find_model("deepseek-v4"), nullptr);
}

}  // namespace
}  // namespace ehc::mhc
