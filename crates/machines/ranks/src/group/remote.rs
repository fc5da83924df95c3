//! `Remote`: a rank on another host, behind a pair of pipes like those of a child. Separate threads resolve the host
//! name, connect and copy the bytes, so that the supervisor sees only non-blocking pipes, and their end.

use std::error::Error;
use std::io::{self, PipeReader, PipeWriter, pipe};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use net::{ClusterKey, HandshakeError};
use types::Rank;

use super::deadlines::Deadlines;
use super::hosts::Route;
use crate::remote::{RankStream, RankStreamHandle};

#[derive(Debug)]
pub(super) struct RemoteProcess {
    shared: Arc<Shared>,
}

/// Shared by the supervisor's thread and the threads of the stream.
#[derive(Debug, Default)]
struct Shared(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    stream: Option<(RankStreamHandle, Route)>,
    /// The supervisor has given the rank up.
    is_dismissed: bool,
    /// Why the stream ended, once it has.
    exit_reason: Option<String>,
}

/// The supervisor's ends of the pipes.
pub(super) struct Pipes {
    pub input: PipeWriter,
    pub output: PipeReader,
}

#[derive(Debug, thiserror::Error)]
enum RemoteError {
    #[error("its name has no address")]
    Name(#[source] io::Error),
    #[error("its name has no address")]
    NoAddress,
    #[error("{address} did not answer as it should")]
    Handshake { address: SocketAddr, source: HandshakeError },
    #[error("its connection is of no use")]
    Io(#[from] io::Error),
}

impl RemoteProcess {
    /// Has `host` start `rank`.
    pub fn start(host: &str, key: &ClusterKey, rank: Rank, deadlines: &Deadlines) -> io::Result<(Self, Pipes)> {
        let (requests, input) = pipe()?;
        let (output, replies) = pipe()?;
        let shared = Arc::new(Shared::default());
        let (held, host, key, silence) = (Arc::clone(&shared), host.to_owned(), key.clone(), deadlines.silent);
        // The rest of the time is for its first reply.
        let deadline = Instant::now() + deadlines.start / 2;
        thread::Builder::new().name(format!("stream {}", rank.index())).spawn(move || {
            let exit_reason = match connect_to_host(&host, &key, rank, silence, deadline) {
                Ok((stream, address)) => copy_both_ways(stream, address, requests, &replies, &held),
                Err(error) => format!("it can not be reached: {}", with_sources(&error)),
            };
            held.lock().exit_reason = Some(exit_reason);
            drop(replies); // the supervisor sees the pipe end, and then reads `exit_reason`
        })?;
        Ok((Self { shared }, Pipes { input, output }))
    }

    /// `None` until it is connected.
    pub fn route(&self) -> Option<Route> {
        self.shared.lock().stream.as_ref().map(|&(_, route)| route)
    }

    /// Whether its host reports that the process is stopped.
    pub fn is_stopped(&self) -> bool {
        self.shared.lock().stream.as_ref().is_some_and(|(end, _)| end.is_stopped())
    }

    /// Why the stream ended, once it has.
    pub fn exit_reason(&self) -> Option<String> {
        self.shared.lock().exit_reason.clone()
    }

    /// Closes the stream; the host then kills the rank.
    pub fn dismiss(&self) {
        let mut state = self.shared.lock();
        state.is_dismissed = true;
        if let Some((end, _)) = &state.stream {
            end.close();
        }
    }
}

impl Shared {
    /// False: the supervisor has given the rank up.
    fn connect(&self, end: &RankStreamHandle, route: Route) -> bool {
        let mut state = self.lock();
        state.stream = Some((end.clone(), route));
        !state.is_dismissed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn connect_to_host(
    host: &str,
    key: &ClusterKey,
    rank: Rank,
    silence: Duration,
    deadline: Instant,
) -> Result<(RankStream, SocketAddr), RemoteError> {
    let mut failure = RemoteError::NoAddress;
    for address in host.to_socket_addrs().map_err(RemoteError::Name)? {
        match RankStream::connect(address, key, rank, silence, deadline) {
            Ok(stream) => return Ok((stream, address)),
            Err(source) => failure = RemoteError::Handshake { address, source },
        }
    }
    Err(failure)
}

/// Copies bytes both ways until one side ends. Returns the reason.
fn copy_both_ways(
    stream: RankStream,
    address: SocketAddr,
    mut requests: PipeReader,
    mut replies: &PipeWriter,
    shared: &Shared,
) -> String {
    let (mut reader, mut writer, end) = stream.split();
    let own = match end.local_address() {
        Ok(own) => own.ip(),
        Err(error) => return format!("it can not be reached: {error}"),
    };
    if !shared.connect(&end, Route { own, theirs: address.ip() }) {
        end.close();
        return "it was given up".to_owned();
    }
    let requesting_end = end.clone();
    // This thread is not joined: it ends when the supervisor closes the pipe, which happens after the supervisor has
    // seen the end of the stream.
    let requesting = thread::Builder::new().name("requests".into()).spawn(move || {
        // However the copy ends, no request arrives any more, so the stream is closed.
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
fn with_sources(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
