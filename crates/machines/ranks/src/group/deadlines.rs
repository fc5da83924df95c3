//! How long a rank may take for each kind of request, and the text form: `step=120,stopped=0.5`, in seconds.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use net::{SILENCE_MAX, SILENCE_MIN};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// From the start of the process to its first reply.
    pub start: Duration,
    /// To join the epoch.
    pub join: Duration,
    /// To load, from one progress report to the next.
    pub load: Duration,
    /// To open, truncate or close a session, or to report counters.
    pub session: Duration,
    /// To run a step.
    pub step: Duration,
    /// To reply to pending requests once the epoch is aborted.
    pub drain: Duration,
    /// How long a rank process may be stopped, as by SIGSTOP.
    pub stopped: Duration,
    /// How long a remote host, or a rank on another host, may be silent.
    pub silent: Duration,
    /// To exit after the shutdown request.
    pub shutdown: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeadlineError {
    #[error("{0:?} is no deadline: write NAME=SECONDS, with commas between several")]
    Form(String),
    #[error("there is no deadline {0:?}, only {names}", names = FIELDS.map(|field| field.name).join(", "))]
    Unknown(String),
    #[error("{0} is there twice")]
    Twice(&'static str),
    #[error("{name} is a number of seconds from {} to {}", min.as_secs_f64(), max.as_secs_f64())]
    Range { name: &'static str, min: Duration, max: Duration },
}

/// One of the deadlines.
struct Field {
    name: &'static str,
    of: fn(&mut Deadlines) -> &mut Duration,
    /// Smallest and largest value.
    range: (Duration, Duration),
}

const FIELDS: [Field; 9] = [
    Field { name: "start", of: |deadlines| &mut deadlines.start, range: ANY },
    Field { name: "join", of: |deadlines| &mut deadlines.join, range: ANY },
    Field { name: "load", of: |deadlines| &mut deadlines.load, range: ANY },
    Field { name: "session", of: |deadlines| &mut deadlines.session, range: ANY },
    Field { name: "step", of: |deadlines| &mut deadlines.step, range: ANY },
    Field { name: "drain", of: |deadlines| &mut deadlines.drain, range: ANY },
    Field { name: "stopped", of: |deadlines| &mut deadlines.stopped, range: ANY },
    Field { name: "silent", of: |deadlines| &mut deadlines.silent, range: SILENT },
    Field { name: "shutdown", of: |deadlines| &mut deadlines.shutdown, range: ANY },
];

/// Shorter deadlines would fail ranks that only waited for a CPU.
const ANY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(24 * 60 * 60));
/// What TCP keepalive can be set to.
const SILENT: (Duration, Duration) = (SILENCE_MIN, SILENCE_MAX);

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            start: Duration::from_secs(30),
            join: Duration::from_secs(30),
            load: Duration::from_secs(300),
            session: Duration::from_secs(120),
            step: Duration::from_secs(120),
            drain: Duration::from_secs(30),
            stopped: Duration::from_secs(2),
            silent: Duration::from_secs(10),
            shutdown: Duration::from_secs(5),
        }
    }
}

/// Deadlines that are not named keep their defaults.
impl FromStr for Deadlines {
    type Err = DeadlineError;

    fn from_str(text: &str) -> Result<Self, DeadlineError> {
        let (mut deadlines, mut seen) = (Self::default(), Vec::new());
        for part in text.split(',') {
            let (name, seconds) = part.split_once('=').ok_or_else(|| DeadlineError::Form(part.to_owned()))?;
            let field = FIELDS.iter().find(|field| field.name == name.trim());
            let &Field { name, of, range: (min, max) } =
                field.ok_or_else(|| DeadlineError::Unknown(name.trim().to_owned()))?;
            if seen.contains(&name) {
                return Err(DeadlineError::Twice(name));
            }
            seen.push(name);
            let given = seconds.trim().parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
            let within = given.filter(|given| (min..=max).contains(given));
            *of(&mut deadlines) = within.ok_or(DeadlineError::Range { name, min, max })?;
        }
        Ok(deadlines)
    }
}

/// The form that [`FromStr`] reads.
impl fmt::Display for Deadlines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut deadlines = *self;
        for (index, Field { name, of, .. }) in FIELDS.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            write!(f, "{comma}{name}={}", of(&mut deadlines).as_secs_f64())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: Result<Deadlines, &str>) {
        let found = text.parse::<Deadlines>().map_err(|error| error.to_string());
        assert_eq!(found, expected.map_err(str::to_owned), "{text}");
    }

    #[test]
    fn those_that_are_named_are_changed_and_the_others_stay() {
        let (step, stopped) = (Duration::from_secs(600), Duration::from_millis(500));
        check("step=600", Ok(Deadlines { step, ..Deadlines::default() }));
        check("stopped=0.5, step = 600", Ok(Deadlines { step, stopped, ..Deadlines::default() }));
    }

    #[test]
    fn what_is_written_is_read_again() {
        let all = Deadlines::default().to_string();
        assert_eq!(all, "start=30,join=30,load=300,session=120,step=120,drain=30,stopped=2,silent=10,shutdown=5");
        check(&all, Ok(Deadlines::default()));
        let odd = Deadlines { drain: Duration::from_millis(1234), ..Deadlines::default() };
        check(&odd.to_string(), Ok(odd));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_would() {
        for seconds in ["0", "0.05", "-1", "86401", "1e300", "inf", "NaN", "soon", "10s", ""] {
            check(&format!("step={seconds}"), Err("step is a number of seconds from 0.1 to 86400"));
        }
        for seconds in ["0.5", "3601"] {
            check(&format!("silent={seconds}"), Err("silent is a number of seconds from 1 to 3600"));
        }
        let form = "\"60\" is no deadline: write NAME=SECONDS, with commas between several";
        check("60", Err(form));
        check("load=1,60", Err(form));
        let unknown =
            "there is no deadline \"stop\", only start, join, load, session, step, drain, stopped, silent, shutdown";
        check("stop=1", Err(unknown));
        check("step=1,load=2,step=1", Err("step is there twice"));
        assert!("".parse::<Deadlines>().is_err() && "step=1,".parse::<Deadlines>().is_err());
    }
}
