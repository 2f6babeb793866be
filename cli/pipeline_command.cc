// `ehc pipeline`: the Engram forward path over a text's ids, timed, checked and explained in JSON.
#include <fmt/core.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/checksum.h"
#include "cli/commands.h"
#include "cli/copy_rate.h"
#include "cli/integers.h"
#include "cli/memory_limit.h"
#include "cli/ngram_statistics.h"
#include "cli/output_path.h"
#include "cli/pipeline.h"
#include "cli/progress.h"
#include "cli/text_inputs.h"
#include "core/file_io.h"
#include "core/tensor_bytes.h"
#include "ehc/error.h"
#include "ehc/version.h"
#include "tables/npy.h"
#include "tables/safetensors.h"

namespace ehc::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string ids, map, layout, json, streams;
  PipelineConfig pipeline;
  int64_t tokens = 0;
  int64_t dense_tokens = -1;
  int64_t saved_tokens = 4096;
  int64_t layer = -1;
  int64_t paragraph_begin = 0;
  int64_t paragraph_tokens = 160;
  int64_t check_chunks = 3;
  int64_t check_tokens = 32;
  size_t top = 20;
  int threads = 0;
};

// Distribution of the gates of each stream, and the gates of one paragraph.
class GateStatistics {
 public:
  GateStatistics(int64_t streams, int64_t begin, int64_t tokens)
      : begin_(begin), end_(begin + tokens), streams_(static_cast<size_t>(streams)) {}

  void add(int64_t first_token, const Tensor& alpha) {
    const auto* values = alpha.as<float>();
    for (int64_t t = 0; t < alpha.shape[0]; ++t) {
      const int64_t token = first_token + t;
      std::vector<float> row(values, values + streams_.size());
      values += streams_.size();
      for (size_t stream = 0; stream < row.size(); ++stream) streams_[stream].add(row[stream]);
      if (token >= begin_ && token < end_) paragraph_.push_back(std::move(row));
    }
  }

  [[nodiscard]] Json to_json() const {
    Json json;
    json["streams"] = Json::array();
    for (const Stream& stream : streams_) json["streams"].push_back(stream.to_json());
    json["paragraph"] = {{"first_token", begin_}, {"alpha", paragraph_}};
    return json;
  }

 private:
  static constexpr size_t kBins = 50;
  struct Stream {
    std::vector<int64_t> histogram = std::vector<int64_t>(kBins, 0);
    int64_t count = 0;
    int64_t nan = 0;  // gates that are no number; they count nowhere else
    double sum = 0, squares = 0, least = 1, most = 0;

    void add(double alpha) {
      if (std::isnan(alpha)) {
        ++nan;
        return;
      }
      const double bin = std::clamp(alpha * kBins, 0.0, kBins - 1.0);
      ++histogram[static_cast<size_t>(bin)];
      ++count;
      sum += alpha;
      squares += alpha * alpha;
      least = std::min(least, alpha);
      most = std::max(most, alpha);
    }
    [[nodiscard]] Json to_json() const {
      if (count == 0) return {{"nan", nan}, {"histogram", histogram}};
      const double mean = sum / static_cast<double>(count);
      const double variance = squares / static_cast<double>(count) - mean * mean;
      return {{"mean", mean}, {"deviation", std::sqrt(std::max(0.0, variance))},
              {"min", least}, {"max", most},
              {"nan", nan},   {"histogram", histogram}};
    }
  };

  int64_t begin_, end_;
  std::vector<Stream> streams_;
  std::vector<std::vector<float>> paragraph_;
};

void require_memory_for(const tables::HashLayout& layout, size_t layer, const Options& options) {
  const PipelineConfig& config = options.pipeline;
  const auto values = [](int64_t a, int64_t b) {
    return static_cast<double>(a) * static_cast<double>(b);
  };
  const int64_t embed = layout.config().columns() * layout.config().row_width;
  const double wanted = 2 * values(layout.rows()[layer], layout.config().row_width) +
                        2 * values(embed, (config.streams + 1) * config.width) +
                        2 * values(config.chunk, embed + (5 * config.streams + 1) * config.width);
  require_memory(wanted, "table, weights and chunk", "a smaller layout, --width or --chunk");
}

int64_t distinct_raw_ids(const Tensor& ids, int64_t vocab) {
  std::vector<bool> seen(static_cast<size_t>(vocab), false);
  int64_t distinct = 0;
  for (int64_t t = 0; t < ids.shape[0]; ++t) {
    const auto id = static_cast<size_t>(integer_at(ids, t));
    distinct += seen[id] ? 0 : 1;
    seen[id] = true;
  }
  return distinct;
}

Json configuration_json(const tables::HashLayout& layout, size_t layer, const Options& options,
                        const Context& context, int64_t tokens, int64_t dense) {
  const tables::HashLayoutConfig& config = layout.config();
  return {{"tokens", tokens},
          {"dense_tokens", dense},
          {"chunk", options.pipeline.chunk},
          {"threads", context.executor().concurrency()},
          {"layer", config.layer_ids[layer]},
          {"rows", layout.rows()[layer]},
          {"row_width", config.row_width},
          {"max_ngram", config.max_ngram()},
          {"heads", config.heads},
          {"rows_per_token", config.columns()},
          {"table_bytes", 2 * layout.rows()[layer] * config.row_width},
          {"streams", options.pipeline.streams},
          {"width", options.pipeline.width},
          {"seed", options.pipeline.seed}};
}

// A chunk in the middle of its share of the text, so that history and state are at work.
bool is_sampled(int64_t chunk, int64_t chunks, int64_t samples) {
  return chunk * samples / chunks != (chunk + 1) * samples / chunks;
}

// The updated streams of the first tokens, kept for a file.
class SavedStreams {
 public:
  SavedStreams(const Context& context, int64_t tokens, const PipelineConfig& config)
      : host_(context, DType::bf16, {tokens, config.streams, config.width}) {}

  void add(int64_t first_token, const Tensor& streams) {
    const int64_t end = std::min(first_token + streams.shape[0], host_.tensor.shape[0]);
    if (end <= first_token) return;
    std::memcpy(host_.tensor.slice(0, first_token, end).data, streams.data,
                bytes_of(streams.slice(0, 0, end - first_token)));
  }
  void write(const std::string& path) const {
    const tables::NamedTensor tensors[] = {{"streams", host_.tensor}};
    tables::write_safetensors(path, tensors);
  }

 private:
  HostTensor host_;
};

Json run_pipeline(const Options& options) {
  const text::TokenMap map = text::TokenMap::load(options.map);
  const tables::HashLayout layout = tables::HashLayout::load(options.layout);
  const tables::NpyArray file = tables::read_npy(options.ids);
  const Tensor ids = usable_ids(file, options.ids, options.tokens);
  const size_t layer = find_layer(layout, options.layout, options.layer);
  require_fitting(map, options.map, layout, options.layout);
  require_memory_for(layout, layer, options);
  const int64_t tokens = ids.shape[0];
  // Whole chunks.
  const int64_t chunk = options.pipeline.chunk;
  const int64_t chunks = (tokens + chunk - 1) / chunk;
  const int64_t dense_chunks = options.dense_tokens < 0
                                   ? chunks
                                   : std::min(chunks, (options.dense_tokens + chunk - 1) / chunk);

  Context context = Context::cpu(options.threads);
  const double ceiling = CopyRate(context).measure();
  Pipeline pipeline(context, map, layout, layer, options.pipeline);
  NgramStatistics ngrams(layout, layer);
  GateStatistics gates(options.pipeline.streams, options.paragraph_begin, options.paragraph_tokens);
  const int64_t dense_tokens = std::min(tokens, dense_chunks * chunk);
  SavedStreams saved(context,
                     options.streams.empty() ? 0 : std::min(options.saved_tokens, dense_tokens),
                     options.pipeline);
  Checksum index_sum;
  Checksum stream_sum;
  std::vector<int64_t> rows;
  {
    Progress progress("text to streams", static_cast<size_t>(tokens));
    for (int64_t at = 0; at < chunks; ++at) {
      const int64_t begin = at * chunk;
      const Tensor ids_here = ids.slice(0, begin, std::min(tokens, begin + chunk));
      const bool is_dense = at < dense_chunks;
      progress.show(static_cast<size_t>(begin), "tokens");
      pipeline.address(ids_here);
      const Tensor indices = pipeline.indices();
      index_sum.add(indices);
      rows.resize(static_cast<size_t>(indices.numel()));
      for (size_t i = 0; i < rows.size(); ++i) {
        rows[i] = integer_at(indices, static_cast<int64_t>(i));
      }
      ngrams.add(begin, ids_here.shape[0], pipeline.window().as<int32_t>(), rows.data());
      if (is_dense) {
        pipeline.update_streams(ids_here);
        gates.add(begin, pipeline.alpha());
        stream_sum.add(pipeline.streams());
        saved.add(begin, pipeline.streams());
      }
      if (is_sampled(at, is_dense ? dense_chunks : chunks, options.check_chunks)) {
        pipeline.check(ids_here, options.check_tokens, is_dense);
      }
    }
  }

  Json json;
  json["version"] = EHC_VERSION_STRING;
  json["configuration"] = configuration_json(layout, layer, options, context, tokens, dense_tokens);
  json["vocabulary"] = {{"ids", map.vocab_size()},
                        {"compressed_ids", map.size()},
                        {"ids_in_text", distinct_raw_ids(ids, map.vocab_size())},
                        {"compressed_ids_in_text", ngrams.distinct_ids()}};
  json["copy_gb_per_second"] = ceiling * 1e-9;
  json["stages"] = stages_json(pipeline.times(), ceiling);
  json["checks"] = pipeline.checks().to_json();
  json["checksums"] = {{"indices", index_sum.text()}, {"streams", stream_sum.text()}};
  json["rows_touched"] = ngrams.rows_touched();
  json["orders"] = ngrams.orders(options.top);
  json["gate"] = gates.to_json();
  if (!options.streams.empty()) saved.write(options.streams);
  return json;
}

void print_summary(const Json& json) {
  print_stages(json["stages"]);
  fmt::print("indices {}  streams {}\n", json["checksums"]["indices"].get<std::string>(),
             json["checksums"]["streams"].get<std::string>());
}

void run(const Options& options) {
  if (!options.streams.empty() && options.dense_tokens == 0) {
    throw UsageError("--save-streams: expected --dense-tokens above 0, got 0");
  }
  for (const std::string& path : {options.json, options.streams}) {
    if (!path.empty()) require_writable(path);
  }
  const Json json = run_pipeline(options);
  if (!options.json.empty()) {
    const std::string text = json.dump(1) + "\n";
    const std::string_view parts[] = {text};
    write_file(options.json, parts);
  }
  print_summary(json);
  require_equal(json["checks"]);
}

}  // namespace

void add_pipeline_command(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "pipeline",
      "Run the Engram forward path over a text's ids: map, window, hash, gather, "
      "projection, gate, convolution, streams");
  command->add_option("--ids", o->ids, "raw token ids, .npy, I32 or I64[T]")->required();
  command->add_option("--map", o->map, "token map (ehc tokmap build)")->required();
  command->add_option("--layout", o->layout, "hash layout (ehc layout)")->required();
  command->add_option("--json", o->json, "file to write all figures to");
  command->add_option("--save-streams", o->streams,
                      "file to write the updated streams to, for ehc streams");
  command->add_option("--saved-tokens", o->saved_tokens, "of the first tokens, at most")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--layer", o->layer, "layer id of the layout (default: its first)");
  command->add_option("--tokens", o->tokens, "read only this many tokens (default: all)")
      ->check(CLI::PositiveNumber);
  command
      ->add_option("--dense-tokens", o->dense_tokens,
                   "run the stages after the hash for only this many (default: all)")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--chunk", o->pipeline.chunk, "tokens at a time")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--streams", o->pipeline.streams, "residual streams")
      ->check(CLI::Range(1, 8))
      ->capture_default_str();
  command->add_option("--width", o->pipeline.width, "values per stream")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  command->add_option("--seed", o->pipeline.seed, "of table, weights and incoming streams")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->add_option("--paragraph-begin", o->paragraph_begin, "first token whose gates are listed")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--paragraph-tokens", o->paragraph_tokens, "how many")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--check-chunks", o->check_chunks, "chunks compared with the reference")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--check-tokens", o->check_tokens, "tokens of each of them")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--top", o->top, "most frequent n-grams listed per order")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->add_option("--threads", o->threads, "0: all cores")
      ->envname("EHC_THREADS")
      ->check(CLI::Range(0, 1024));
  command->callback([o] { run(*o); });
}

}  // namespace ehc::cli
