#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "ehc/table.h"
#include "tables/safetensors.h"
#include "tests/tables/table_test_support.h"

namespace ehc::tables {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

HashLayoutConfig small_config() {
  return {.layer_ids = {1, 4},
          .sizes = {50, 20, 50},
          .heads = 3,
          .row_width = 16,
          .compressed_vocab = 1000,
          .seed = 7,
          .scheme = MultiplierScheme::numpy,
          .blocking = WindowBlocking::farther,
          .pad_id = 2,
          .reset_id = 9};
}

void expect_all_laws(const HashLayout& layout) {
  const auto results = layout.check();
  EXPECT_EQ(results.size(), 7u);
  for (const LayoutCheck& result : results) {
    EXPECT_TRUE(result.holds) << result.law << ": " << result.fault;
    EXPECT_EQ(result.fault, "");
  }
}

TEST(HashLayout, DeepseekV41) {
  const HashLayout layout = HashLayout::make(HashLayoutConfig::deepseek_v4_1());
  EXPECT_EQ(layout.config().columns(), 24);
  EXPECT_EQ(layout.config().columns() * layout.config().row_width, 6144);
  EXPECT_THAT(layout.rows(), ElementsAre(384006168, 384016682));
  EXPECT_THAT(layout.multipliers(),
              ElementsAre(76632096046245, 4839876093313, 35959672319349, 73987337458391,
                          67716810739261, 51510806800915, 30921347202721, 82619226485591));
  EXPECT_EQ(layout.vocab_sizes().front(), 16000057);
  EXPECT_EQ(layout.vocab_sizes().back(), 16000889);
  EXPECT_EQ(layout.offsets()[23] + 16000463, 384006168);
  EXPECT_EQ(layout.offsets()[24], 0);
  EXPECT_EQ(layout.index_dtype(), DType::i32);
  EXPECT_EQ(layout.config().blocking, WindowBlocking::farther);
  EXPECT_EQ(layout.config().pad_id, 2);
  expect_all_laws(layout);
}

TEST(HashLayout, Demo) {
  const HashLayout layout = HashLayout::make(HashLayoutConfig::demo(129280));
  EXPECT_THAT(layout.multipliers(), ElementsAre(58737837727525, 3709723095905, 27562777300965,
                                                22166238923025, 42939128327945, 41336139856257));
  EXPECT_EQ(layout.config().heads * layout.config().row_width, 512);
  EXPECT_EQ(layout.config().columns(), 16);
  EXPECT_EQ(layout.vocab_sizes().front(), 646403);
  EXPECT_EQ(layout.vocab_sizes().back(), 646879);
  expect_all_laws(layout);
}

TEST(HashLayout, Qwen38) {
  const HashLayout layout = HashLayout::make(HashLayoutConfig::qwen3_8());
  EXPECT_EQ(layout.config().columns(), 16);
  EXPECT_EQ(layout.config().reset_id, 248044);
  // 51.2 B parameters.
  EXPECT_EQ((layout.rows()[0] * layout.config().row_width + 50000000) / 100000000, 512);
  expect_all_laws(layout);
}

// The SplitMix64 stream of a layer belongs to its position in the list, the NumPy one to its id.
TEST(HashLayout, LayerNumbersOrPositions) {
  HashLayoutConfig config = small_config();
  const auto numpy = HashLayout::make(config).multipliers();
  config.scheme = MultiplierScheme::splitmix64;
  const auto splitmix = HashLayout::make(config).multipliers();
  config.layer_ids = {0, 1};
  EXPECT_EQ(HashLayout::make(config).multipliers(), splitmix);
  config.scheme = MultiplierScheme::numpy;
  EXPECT_NE(HashLayout::make(config).multipliers(), numpy);
}

TEST(HashLayout, Views) {
  const HashLayout layout = HashLayout::make(small_config());
  const Tensor sizes = layout.vocab_sizes_tensor();
  EXPECT_EQ(sizes.dtype, DType::i32);
  EXPECT_EQ(sizes.rank, 3);
  EXPECT_THAT(std::vector<int64_t>(sizes.shape, sizes.shape + 3), ElementsAre(2, 3, 3));
  EXPECT_EQ(layout.multipliers_tensor().shape[1], 4);
  EXPECT_EQ(layout.offsets_tensor().shape[1], 9);
  EXPECT_EQ(layout.offsets_tensor().as<int64_t>()[1], 53);
}

TEST(HashLayout, IndexTypeFollowsTheRows) {
  HashLayoutConfig config = small_config();
  config.sizes = {1000000000, 1000000000};
  config.heads = 1;
  EXPECT_EQ(HashLayout::make(config, DType::i32).index_dtype(), DType::i32);
  config.sizes.push_back(1000000000);
  EXPECT_EQ(HashLayout::make(config).index_dtype(), DType::i64);
  EXPECT_EQ(error_text(ErrorKind::contract, [&] { (void)HashLayout::make(config, DType::i32); }),
            "tensor 'vocab_sizes': expected sums <= 2147483647 for I32 offsets, got 3000000037 in "
            "layer 0");
}

TEST(HashLayout, RefusesIllegalConfigurations) {
  const auto refused = [](auto change) {
    HashLayoutConfig config = small_config();
    change(config);
    return error_text(ErrorKind::contract, [&] { (void)HashLayout::make(config); });
  };
  EXPECT_EQ(refused([](auto&) {}), "no error");
  EXPECT_EQ(refused([](auto& c) { c.heads = 0; }),
            "attribute 'heads': expected 1..2147483647, got 0");
  EXPECT_EQ(refused([](auto& c) { c.row_width = 0; }),
            "attribute 'row_width': expected 1..2147483647, got 0");
  EXPECT_EQ(refused([](auto& c) { c.pad_id = -1; }),
            "attribute 'pad_id': expected 0..2147483647, got -1");
  EXPECT_EQ(refused([](auto& c) { c.reset_id = int64_t{1} << 31; }),
            "attribute 'reset_id': expected -1..2147483647, got 2147483648");
  EXPECT_EQ(refused([](auto& c) {
              c.layer_ids = {3, 3};
            }),
            "attribute 'layer_ids': expected distinct layers, got 3 twice");
  EXPECT_THAT(refused([](auto& c) { c.layer_ids = {}; }), HasSubstr("'layer_ids'"));
  EXPECT_THAT(refused([](auto& c) { c.sizes = {}; }), HasSubstr("'max_ngram'"));
  EXPECT_THAT(refused([](auto& c) { c.sizes.assign(8, 50); }), HasSubstr("'max_ngram'"));
  EXPECT_THAT(refused([](auto& c) { c.sizes[1] = 0; }), HasSubstr("'sizes'"));
  EXPECT_THAT(refused([](auto& c) { c.compressed_vocab = 0; }), HasSubstr("'compressed_vocab'"));
  EXPECT_THAT(refused([](auto& c) { c.seed = -1; }), HasSubstr("'seed'"));
}

// --- files ---------------------------------------------------------------------------------------

TEST(HashLayoutFile, SaveAndLoad) {
  const ScratchFolder folder;
  for (HashLayoutConfig config : {small_config(), HashLayoutConfig::qwen3_8()}) {
    config.seed = INT64_MAX;
    const HashLayout layout = HashLayout::make(config);
    layout.save(folder.file("l"));
    const HashLayout loaded = HashLayout::load(folder.file("l"));
    EXPECT_EQ(loaded.config(), config);
    EXPECT_EQ(loaded.multipliers(), layout.multipliers());
    EXPECT_EQ(loaded.vocab_sizes(), layout.vocab_sizes());
    EXPECT_EQ(loaded.offsets(), layout.offsets());
    EXPECT_EQ(loaded.rows(), layout.rows());
  }
}

// A layout file whose parts can be changed before it is loaded.
class TamperedLayout {
 public:
  TamperedLayout() {
    HashLayout::make(small_config()).save(folder_.file("l"));
    original_ = std::make_unique<SafetensorsFile>(SafetensorsFile::open(folder_.file("l")));
    for (const auto& [name, tensor] : original_->tensors()) tensors.push_back({name, tensor});
    metadata = original_->metadata();
  }

  template <class T>
  T* data(const std::string& name) {
    return original_->find(name).as<T>();
  }

  // Error of loading, without the path.
  std::string load_error(bool checked = true) {
    write_safetensors(folder_.file("t"), tensors, metadata);
    const std::string text =
        error_text(ErrorKind::io, [&] { (void)HashLayout::load(folder_.file("t"), checked); });
    const std::string prefix = folder_.file("t") + ": ";
    if (text == "no error") return text;
    EXPECT_EQ(text.substr(0, prefix.size()), prefix);
    return text.substr(prefix.size());
  }

  // Laws that do not hold.
  std::vector<std::string> broken_laws() {
    write_safetensors(folder_.file("t"), tensors, metadata);
    std::vector<std::string> broken;
    for (const LayoutCheck& result : HashLayout::load(folder_.file("t"), false).check()) {
      if (!result.holds) broken.push_back(result.law);
    }
    return broken;
  }

  void replace_in_config(const std::string& from, const std::string& to) {
    std::string& text = metadata.at("ehc_layout");
    const size_t position = text.find(from);
    ASSERT_NE(position, std::string::npos);
    text.replace(position, from.size(), to);
  }

  std::vector<NamedTensor> tensors;
  Metadata metadata;

 private:
  ScratchFolder folder_;
  std::unique_ptr<SafetensorsFile> original_;
};

TEST(HashLayoutFile, UnchangedIsAccepted) {
  TamperedLayout file;
  EXPECT_EQ(file.load_error(), "no error");
  EXPECT_THAT(file.broken_laws(), ElementsAre());
}

TEST(HashLayoutFile, EveryLawIsChecked) {
  {
    TamperedLayout file;
    file.data<int64_t>("multipliers")[5] += 1;
    EXPECT_THAT(file.load_error(),
                HasSubstr("multipliers are odd: layer 4, position 1: expected an "
                          "odd number >= 1, got "));
    EXPECT_EQ(file.load_error(/*checked=*/false), "no error");
  }
  {
    TamperedLayout file;
    file.data<int64_t>("multipliers")[0] += 2;
    EXPECT_THAT(file.broken_laws(), ElementsAre("multipliers follow from the configuration"));
  }
  {
    TamperedLayout file;
    file.data<int64_t>("multipliers")[0] = INT64_MAX / 999 / 2 * 2 + 3;
    EXPECT_THAT(file.broken_laws(), ElementsAre("products stay below 2^63",
                                                "multipliers follow from the configuration"));
  }
  {
    TamperedLayout file;
    file.data<int32_t>("vocab_sizes")[10] = 91;
    EXPECT_THAT(file.load_error(),
                HasSubstr("sizes are prime: layer 4, position 1: 91 is not prime"));
  }
  {
    TamperedLayout file;
    file.data<int32_t>("vocab_sizes")[10] = -83;
    EXPECT_THAT(file.load_error(), HasSubstr("-83 is not prime"));
  }
  {
    TamperedLayout file;
    file.data<int32_t>("vocab_sizes")[10] = 53;
    EXPECT_THAT(file.load_error(),
                HasSubstr("sizes are distinct: layer 4, position 1 repeats 53 of "
                          "layer 1, position 0"));
  }
  {
    TamperedLayout file;
    file.data<int64_t>("offsets")[2] += 1;
    EXPECT_EQ(file.load_error(),
              "offsets and rows are sums of sizes: layer 1, position 2: expected 112, got 113");
    EXPECT_EQ(file.broken_laws().size(), 1u);
  }
  {
    TamperedLayout file;
    file.data<int64_t>("rows")[1] -= 1;
    EXPECT_THAT(file.load_error(), HasSubstr("rows of layer 4: expected "));
  }
  {
    // The last prime replaced by the next free one: every single law of the sizes holds.
    TamperedLayout file;
    file.data<int32_t>("vocab_sizes")[17] = 107;
    file.data<int64_t>("rows")[1] += 107 - 103;
    EXPECT_THAT(file.broken_laws(), ElementsAre("sizes follow from the configuration"));
  }
  {
    TamperedLayout file;
    file.replace_in_config("\"seed\":7", "\"seed\":8");
    EXPECT_THAT(file.broken_laws(), ElementsAre("multipliers follow from the configuration"));
  }
  {
    TamperedLayout file;
    file.replace_in_config("\"row_width\":16", "\"row_width\":0");
    EXPECT_THAT(file.load_error(), HasSubstr("the configuration is legal: attribute 'row_width'"));
  }
}

TEST(HashLayoutFile, RefusesOtherFiles) {
  {
    TamperedLayout file;
    file.metadata.clear();
    EXPECT_EQ(file.load_error(), "not a hash layout: no metadata 'ehc_layout'");
  }
  {
    TamperedLayout file;
    file.tensors.pop_back();
    EXPECT_EQ(file.load_error(), "not a hash layout: no tensor 'vocab_sizes'");
  }
  {
    TamperedLayout file;
    file.tensors.push_back({"extra", file.tensors[0].tensor});
    EXPECT_EQ(file.load_error(), "not a hash layout: unknown tensors");
  }
  {
    TamperedLayout file;
    file.tensors[0].tensor.dtype = DType::i32;
    EXPECT_THAT(file.load_error(), HasSubstr("dtype or shape does not fit the configuration"));
  }
  const auto with_config = [](const std::string& from, const std::string& to) {
    TamperedLayout file;
    file.replace_in_config(from, to);
    return file.load_error();
  };
  EXPECT_EQ(with_config("{\"version\"", "[\"version\""),
            "metadata 'ehc_layout': expected a JSON object");
  EXPECT_EQ(with_config("\"version\":1", "\"version\":2"),
            "metadata 'ehc_layout': expected version 1, got 2");
  EXPECT_EQ(with_config("\"heads\":3,", ""), "metadata 'ehc_layout': no field 'heads'");
  EXPECT_EQ(with_config("\"heads\":3", "\"heads\":3.5"),
            "metadata 'ehc_layout': field 'heads': expected 64-bit integers");
  EXPECT_EQ(with_config("\"seed\":7", "\"seed\":9223372036854775808"),
            "metadata 'ehc_layout': field 'seed': expected 64-bit integers");
  EXPECT_EQ(with_config("[1,4]", "3"),
            "metadata 'ehc_layout': field 'layer_ids': expected a list of integers");
  EXPECT_EQ(with_config("\"numpy\"", "\"python\""),
            "metadata 'ehc_layout': field 'scheme': expected numpy or splitmix64");
  EXPECT_EQ(with_config("\"pad_id\"", "\"x\":1,\"pad_id\""),
            "metadata 'ehc_layout': unknown field 'x'");
  // Sizes that no multiplication may overflow on.
  EXPECT_THAT(with_config("\"heads\":3", "\"heads\":9223372036854775807"),
              HasSubstr("does not fit the configuration"));
  EXPECT_THAT(with_config("\"compressed_vocab\":1000", "\"compressed_vocab\":-9223372036854775808"),
              HasSubstr("the configuration is legal: attribute 'compressed_vocab'"));
}

}  // namespace
}  // namespace ehc::tables
