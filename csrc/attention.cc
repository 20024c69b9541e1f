// Attention kernels and accesses to the KV cache, compiled for one instruction set.

#include "attention.h"
#include "latent.h"
#include "sparse.h"

namespace penstock {
namespace PENSTOCK_ISA {

void store(const Store& a, int64_t token) {
  with_kv_type(a.type, a.quantized, [&]<class T, class K>() { store_token<T, K>(a, token); });
}

void export_kv(const KVTransfer& a, int64_t task) {
  with_kv_type(a.type, a.quantized, [&]<class T, class K>() {
    a.latent ? transfer_latent<K, true>(a, task) : transfer_tokens<K, true>(a, task);
  });
}

void import_kv(const KVTransfer& a, int64_t task) {
  with_kv_type(a.type, a.quantized, [&]<class T, class K>() {
    a.latent ? transfer_latent<K, false>(a, task) : transfer_tokens<K, false>(a, task);
  });
}

void attention(const Attention& a, int64_t task) {
  const AmxScope tiles;
  with_kv_type(a.type, a.quantized,
               [&]<class T, class K>() { a.latent ? latent_task<T, K>(a, task) : attention_task<T, K>(a, task); });
}

void latent_merge(const Attention& a, int64_t task) {
  a.type == Type::float32 ? merge_splits<float>(a, task) : merge_splits<bf16>(a, task);
}

void latent_store(const LatentStore& a, int64_t token) {
  with_kv_type(a.type, a.quantized, [&]<class T, class K>() { store_latent<T, K>(a, token); });
}

void index_scores(const SelectKeys& a, int64_t task) {
  a.type == Type::float32 ? score_positions<float>(a, task) : score_positions<bf16>(a, task);
}

void select_keys(const SelectKeys& a, int64_t token) { select_positions(a, token); }

}  // namespace PENSTOCK_ISA
}  // namespace penstock
