// Signals that ask a run to end, for loops that save first.
#ifndef MOE_MOE_CHECKPOINT_STOP_SIGNAL_H_
#define MOE_MOE_CHECKPOINT_STOP_SIGNAL_H_

namespace moe {

// While one lives, the first SIGTERM, SIGHUP (the terminal is gone), SIGUSR1 (Slurm:
// --signal=USR1@120) or SIGINT of the process is remembered and the next ends it as without this
// class. What the process was started to ignore (nohup), it goes on to. One at a time; its ranks
// share it.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  // The signal that came; 0: none. Any thread.
  int received() const;
};

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_STOP_SIGNAL_H_
