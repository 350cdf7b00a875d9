#include "comm/nccl/nccl_auth.h"

#include <cstddef>
#include <string>

#include <absl/strings/str_cat.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr std::array<char, 16> kMagic = {"moe-nccl-tcp-1\n"};

absl::StatusOr<StoreNonce> FreshNonce() {
  StoreNonce nonce;
  if (RAND_bytes(nonce.data(), static_cast<int>(nonce.size())) == 1) return nonce;
  return absl::InternalError("JoinNcclByTcp: OpenSSL has no random numbers");
}

absl::StatusOr<StoreProof> Prove(const StoreSession& session, absl::string_view label,
                                 absl::string_view claim, absl::string_view said) {
  // Under one label the place alone varies in length.
  const std::string all =
      absl::StrCat(label, BytesOf(session.greeting), claim, said, session.place);
  StoreProof proof;
  unsigned int bytes = 0;
  if (HMAC(EVP_sha256(), session.secret.data(), static_cast<int>(session.secret.size()),
           reinterpret_cast<const unsigned char*>(all.data()), all.size(), proof.data(),
           &bytes) != nullptr &&
      bytes == proof.size()) {
    return proof;
  }
  return absl::InternalError("JoinNcclByTcp: OpenSSL has no HMAC-SHA256");
}

absl::StatusOr<StoreProof> ProofOf(const StoreSession& session, const StoreClaim& claim) {
  return Prove(session, "claim\n", BytesOf(claim).substr(0, offsetof(StoreClaim, proof)), "");
}

absl::StatusOr<StoreProof> ProofOf(const StoreSession& session, const StoreClaim& claim,
                                   const NcclAnnouncement& said) {
  return Prove(session, "answer\n", BytesOf(claim), BytesOf(said));
}

bool Same(const absl::StatusOr<StoreProof>& expected, const StoreProof& given) {
  return expected.ok() && CRYPTO_memcmp(expected->data(), given.data(), given.size()) == 0;
}

}  // namespace

absl::StatusOr<StoreGreeting> MakeGreeting() {
  StoreGreeting greeting{.magic = kMagic};
  MOE_ASSIGN_OR_RETURN(greeting.nonce, FreshNonce());
  return greeting;
}

absl::StatusOr<StoreClaim> MakeClaim(const StoreSession& session, int rank, int size) {
  StoreClaim claim{.rank = rank, .size = size};
  MOE_ASSIGN_OR_RETURN(claim.nonce, FreshNonce());
  MOE_ASSIGN_OR_RETURN(claim.proof, ProofOf(session, claim));
  return claim;
}

absl::StatusOr<StoreAnswer> MakeAnswer(const StoreSession& session, const StoreClaim& claim,
                                       const NcclAnnouncement& said) {
  StoreAnswer answer{.said = said};
  MOE_ASSIGN_OR_RETURN(answer.proof, ProofOf(session, claim, said));
  return answer;
}

bool IsGreeting(const StoreGreeting& greeting) {
  return greeting.magic == kMagic;
}

bool IsProven(const StoreSession& session, const StoreClaim& claim) {
  return Same(ProofOf(session, claim), claim.proof);
}

bool IsProven(const StoreSession& session, const StoreClaim& claim, const StoreAnswer& answer) {
  return Same(ProofOf(session, claim, answer.said), answer.proof);
}

}  // namespace moe
