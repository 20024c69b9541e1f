// Attention of one instruction set, and what it reads.

#include "attention.h"
#include "latent.h"

namespace penstock {
namespace PENSTOCK_ISA {

void store(const Store& a, int64_t token) {
  with_kept(a.type, a.rounded, [&]<class T, class K>() { store_token<T, K>(a, token); });
}

void export_kv(const Exchange& a, int64_t task) {
  with_kept(a.type, a.rounded,
            [&]<class T, class K>() { a.latent ? exchange_latent<K, true>(a, task) : exchange_tokens<K, true>(a, task); });
}

void import_kv(const Exchange& a, int64_t task) {
  with_kept(a.type, a.rounded,
            [&]<class T, class K>() { a.latent ? exchange_latent<K, false>(a, task) : exchange_tokens<K, false>(a, task); });
}

void attention(const Attention& a, int64_t task) {
  const TileUse tiles;
  with_kept(a.type, a.rounded,
            [&]<class T, class K>() { a.latent ? latent_task<T, K>(a, task) : attention_task<T, K>(a, task); });
}

void latent_join(const Attention& a, int64_t task) {
  a.type == Type::float32 ? join_parts<float>(a, task) : join_parts<bf16>(a, task);
}

void latent_store(const LatentStore& a, int64_t token) {
  with_kept(a.type, a.rounded, [&]<class T, class K>() { store_latent<T, K>(a, token); });
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
