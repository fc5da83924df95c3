//! How long a rank may take for what it is asked.

use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// From the start of the process to its first answer.
    pub greet: Duration,
    /// To take a seat.
    pub attach: Duration,
    /// To load, from one sign of progress to the next.
    pub load: Duration,
    /// To open or close a session, to count something.
    pub note: Duration,
    /// To run a step.
    pub step: Duration,
    /// To answer what it was asked, once the group is aborted.
    pub drain: Duration,
    /// To stay stopped, as by SIGSTOP.
    pub stopped: Duration,
    /// To end, once it is told to.
    pub shutdown: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            greet: Duration::from_secs(30),
            attach: Duration::from_secs(30),
            load: Duration::from_secs(300),
            note: Duration::from_secs(120),
            step: Duration::from_secs(120),
            drain: Duration::from_secs(30),
            stopped: Duration::from_secs(2),
            shutdown: Duration::from_secs(5),
        }
    }
}
