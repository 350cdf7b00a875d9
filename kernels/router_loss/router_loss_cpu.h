// The CPU path of router_loss.h.
#ifndef MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_CPU_H_
#define MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_CPU_H_

#include "kernels/base/parallel.h"
#include "kernels/router_loss/loss_terms.h"

namespace moe::router_loss {

void Run(const Balance& balance, ThreadPool& threads);
void Run(const ZLoss& z, ThreadPool& threads);
void Run(const Entropy& entropy, ThreadPool& threads);

}  // namespace moe::router_loss

#endif  // MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_CPU_H_
