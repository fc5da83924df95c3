//! `Remote`: a rank on another host, behind a pair of pipes like those of a child. Threads of its own find the host, connect and
//! carry the bytes, so that the supervisor sees pipes that do not block, and their end.

use std::error::Error;
use std::io::{self, PipeReader, PipeWriter, pipe};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use types::Rank;

use super::deadlines::Deadlines;
use super::hosts::Route;
use crate::tcp::{ClusterKey, HandshakeError, Link, LinkEnd};

#[derive(Debug)]
pub(super) struct Remote {
    shared: Arc<Shared>,
}

/// What the supervisor's thread and those of the link both know.
#[derive(Debug, Default)]
struct Shared(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    link: Option<(LinkEnd, Route)>,
    /// Nobody wants it any more.
    is_dismissed: bool,
    /// Why nothing more comes, once nothing does.
    ending: Option<String>,
}

/// The supervisor's ends of the pipes.
pub(super) struct Pipes {
    pub input: PipeWriter,
    pub output: PipeReader,
}

#[derive(Debug, thiserror::Error)]
enum ReachError {
    #[error("its name has no address")]
    Name(#[source] io::Error),
    #[error("its name has no address")]
    Nameless,
    #[error("{address} did not answer as it should")]
    Handshake { address: SocketAddr, source: HandshakeError },
    #[error("its connection is of no use")]
    Io(#[from] io::Error),
}

impl Remote {
    /// Has `host` start `rank`.
    pub fn start(host: &str, key: &ClusterKey, rank: Rank, deadlines: &Deadlines) -> io::Result<(Self, Pipes)> {
        let (requests, input) = pipe()?;
        let (output, replies) = pipe()?;
        let shared = Arc::new(Shared::default());
        let (held, host, key, silence) = (Arc::clone(&shared), host.to_owned(), key.clone(), deadlines.silent);
        // The rest of the time is for its first answer.
        let deadline = Instant::now() + deadlines.start / 2;
        thread::Builder::new().name(format!("link {}", rank.index())).spawn(move || {
            let ending = match reach(&host, &key, rank, silence, deadline) {
                Ok((link, address)) => carry(link, address, requests, &replies, &held),
                Err(error) => format!("it can not be reached: {}", told(&error)),
            };
            held.lock().ending = Some(ending);
            drop(replies); // the supervisor sees the end, and asks for the reason
        })?;
        Ok((Self { shared }, Pipes { input, output }))
    }

    /// Once it is connected.
    pub fn route(&self) -> Option<Route> {
        self.shared.lock().link.as_ref().map(|&(_, route)| route)
    }

    /// Whether its host says that it was stopped.
    pub fn is_stopped(&self) -> bool {
        self.shared.lock().link.as_ref().is_some_and(|(end, _)| end.is_stopped())
    }

    /// Why nothing more comes from it, once nothing does.
    pub fn ending(&self) -> Option<String> {
        self.shared.lock().ending.clone()
    }

    /// Its host ends a rank whose link ends.
    pub fn dismiss(&self) {
        let mut state = self.shared.lock();
        state.is_dismissed = true;
        if let Some((end, _)) = &state.link {
            end.close();
        }
    }
}

impl Shared {
    /// False: nobody wants it any more.
    fn connect(&self, end: &LinkEnd, route: Route) -> bool {
        let mut state = self.lock();
        state.link = Some((end.clone(), route));
        !state.is_dismissed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn reach(
    host: &str,
    key: &ClusterKey,
    rank: Rank,
    silence: Duration,
    deadline: Instant,
) -> Result<(Link, SocketAddr), ReachError> {
    let mut failure = ReachError::Nameless;
    for address in host.to_socket_addrs().map_err(ReachError::Name)? {
        match Link::connect(address, key, rank, silence, deadline) {
            Ok(link) => return Ok((link, address)),
            Err(source) => failure = ReachError::Handshake { address, source },
        }
    }
    Err(failure)
}

/// Carries bytes both ways until one side ends. Tells why.
fn carry(
    link: Link,
    address: SocketAddr,
    mut requests: PipeReader,
    mut replies: &PipeWriter,
    shared: &Shared,
) -> String {
    let (mut reader, mut writer, end) = link.split();
    let own = match end.local_address() {
        Ok(own) => own.ip(),
        Err(error) => return format!("it can not be reached: {error}"),
    };
    if !shared.connect(&end, Route { own, theirs: address.ip() }) {
        end.close();
        return "it was given up".to_owned();
    }
    let requesting_end = end.clone();
    // It is not joined: it waits for the supervisor to let go of the pipe, who first wants to know of the end.
    let requesting = thread::Builder::new().name("requests".into()).spawn(move || {
        // However it ends, nothing that is asked arrives any more.
        let _ = io::copy(&mut requests, &mut writer);
        requesting_end.close();
    });
    let carried = requesting.and_then(|_| io::copy(&mut reader, &mut replies));
    end.close();
    match carried {
        Ok(_) => "its process ended".to_owned(),
        Err(error) => format!("the connection to its host broke: {error}"),
    }
}

/// An error and what caused it.
fn told(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
