#include "cli/train_checkpoint.h"

#include <fmt/format.h>

#include <cstring>

#include "cli/checksum.h"
#include "core/file_io.h"
#include "core/tensor_bytes.h"
#include "ehc/error.h"
#include "tables/safetensors.h"

namespace ehc::cli {

namespace {

constexpr const char* kMetadataKey = "ehc_train";
constexpr int kVersion = 1;

Tensor view_of(const std::vector<float>& losses) {
  return {losses.data(), DType::f32, {static_cast<int64_t>(losses.size())}};
}

std::vector<tables::NamedTensor> named_tensors(const std::vector<Parameter>& parameters) {
  std::vector<tables::NamedTensor> named;
  for (const Parameter& parameter : parameters) {
    named.push_back({parameter.name, parameter.value.tensor});
    named.push_back({parameter.name + ".momentum", parameter.momentum.tensor});
  }
  return named;
}

std::string checksum_of(const std::vector<tables::NamedTensor>& tensors, const Tensor& losses) {
  Checksum sum;
  for (const tables::NamedTensor& entry : tensors) sum.add(entry.tensor);
  sum.add(losses);
  return sum.text();
}

void require_settings(const std::string& path, const TrainSettings& found,
                      const TrainSettings& settings) {
  for (const auto& [name, value] : settings.items()) {
    const auto there = found.find(name);
    if (there == found.end() || *there != value) {
      throw Error(ErrorKind::contract,
                  fmt::format("{}: a checkpoint of other settings: expected {} {}, got {}", path,
                              name, value.dump(), there == found.end() ? "none" : there->dump()));
    }
  }
}

}  // namespace

std::string checksum_of(const std::vector<Parameter>& parameters,
                        const std::vector<float>& losses) {
  return checksum_of(named_tensors(parameters), view_of(losses));
}

void save_checkpoint(const std::string& path, const std::vector<Parameter>& parameters,
                     const std::vector<float>& losses, const TrainSettings& settings) {
  std::vector<tables::NamedTensor> tensors = named_tensors(parameters);
  const nlohmann::ordered_json json{{"version", kVersion},
                                    {"step", losses.size()},
                                    {"settings", settings},
                                    {"xxh64", checksum_of(tensors, view_of(losses))}};
  tensors.push_back({"losses", view_of(losses)});
  tables::write_safetensors(path, tensors, {{kMetadataKey, json.dump()}});
}

std::vector<float> load_checkpoint(const std::string& path, std::vector<Parameter>& parameters,
                                   const TrainSettings& settings) {
  const auto file = tables::SafetensorsFile::open(path);
  const auto entry = file.metadata().find(kMetadataKey);
  if (entry == file.metadata().end()) throw_io(path, "expected a checkpoint of ehc train");
  const auto json = nlohmann::ordered_json::parse(entry->second, nullptr, false);
  if (!json.is_object() || json.value("version", nlohmann::ordered_json()) != kVersion ||
      !json.contains("settings") || !json["settings"].is_object()) {
    throw_io(path, fmt::format("metadata '{}': expected version {} of a checkpoint", kMetadataKey,
                               kVersion));
  }
  require_settings(path, json["settings"], settings);

  const Tensor losses = file.find("losses");
  if (losses.dtype != DType::f32 || losses.rank != 1 ||
      json.value("step", nlohmann::ordered_json()) != losses.shape[0]) {
    throw_io(path, "tensor 'losses': expected one F32 for every step");
  }
  const std::vector<tables::NamedTensor> targets = named_tensors(parameters);
  std::vector<tables::NamedTensor> found;
  for (const tables::NamedTensor& target : targets) {
    found.push_back({target.name, file.find(target.name)});
    const Tensor& tensor = found.back().tensor;
    if (tensor.dtype != DType::f32 || tensor.rank != 2 ||
        tensor.shape[0] != target.tensor.shape[0] || tensor.shape[1] != target.tensor.shape[1]) {
      throw_io(path, fmt::format("tensor '{}': expected F32[{},{}]", target.name,
                                 target.tensor.shape[0], target.tensor.shape[1]));
    }
  }
  if (json.value("xxh64", nlohmann::ordered_json()) != checksum_of(found, losses)) {
    throw_io(path, "damaged: its tensors do not have the checksum that it names");
  }
  for (size_t i = 0; i < targets.size(); ++i) {
    std::memcpy(targets[i].tensor.data, found[i].tensor.data, bytes_of(targets[i].tensor));
  }
  const auto* values = losses.as<float>();
  return {values, values + losses.shape[0]};
}

}  // namespace ehc::cli
