//! Starts rank processes for supervisors on other hosts. A supervisor that has the key gets a rank process, and a
//! stream that carries its lines. When one of the two ends, the other is ended. The supervisor is informed when the
//! process is stopped.

use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use net::{AcceptedStream, ClusterKey, MessageStream, PurposeLimit, SecureListener, TICK};
use types::Rank;

use super::rank_stream::RankStream;
use crate::stopped::is_stopped;
use collectives::tcp::{RankHello, RankPurpose};

/// Ranks that one host runs at once.
pub const RANKS_MAX: usize = 64;

/// How often a host reports whether a rank is stopped.
const STATUS_INTERVAL: Duration = Duration::from_millis(250);

const PUMP_BYTES: usize = 1 << 16;

/// A rank process that was started.
pub struct RankProcess {
    pub pid: u32,
    pub stdin: Box<dyn Write + Send>,
    pub stdout: Box<dyn Read + Send>,
    /// Kills the process, if it still runs, and reaps it. Called once the stream or the process has ended.
    pub kill: Box<dyn FnOnce() + Send>,
}

/// Starts a rank by `spawn` for each supervisor that connects, until `is_over`; then kills them all. If a rank cannot
/// be started, the supervisor's stream is closed.
pub fn serve_ranks(
    listener: &TcpListener,
    key: &ClusterKey,
    spawn: impl Fn(Rank) -> io::Result<RankProcess> + Sync,
    is_over: impl Fn() -> bool + Sync,
) -> io::Result<()> {
    // A rank group has one supervisor, so one address may have all ranks.
    let limit = PurposeLimit { purpose: RankPurpose::StartRank.purpose(), in_all: RANKS_MAX, per_address: RANKS_MAX };
    let run = |hello: RankHello, accepted: AcceptedStream| {
        if let (Ok(messages), Ok(process)) = (MessageStream::new(accepted.secured), spawn(hello.from)) {
            serve_rank(RankStream::new(messages), process, &is_over);
        }
    };
    SecureListener { listener, key, limits: &[limit] }.serve(RankHello::parse, run, &is_over)
}

/// Copies bytes both ways until one side ends; then ends the other.
fn serve_rank(stream: RankStream, process: RankProcess, is_over: &(dyn Fn() -> bool + Sync)) {
    let RankProcess { pid, mut stdin, mut stdout, kill } = process;
    let (mut reader, mut writer, end) = stream.split();
    let status = writer.clone();
    let (running, over) = channel::<()>();
    let has_ended = &AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(move || {
            pump(&mut reader, &mut stdin);
            has_ended.store(true, Release);
        });
        scope.spawn(move || {
            if pump(&mut stdout, &mut writer) {
                // The supervisor may have disconnected already, so the error is ignored.
                let _ = writer.finish();
            }
            has_ended.store(true, Release);
        });
        scope.spawn(move || {
            while over.recv_timeout(STATUS_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if status.send_status(is_stopped(pid)).is_err() {
                    break;
                }
            }
        });
        // A copying thread that is blocked on one side does not see the other side end.
        while !has_ended.load(Acquire) && !is_over() && !end.is_hung_up(TICK) {}
        kill();
        end.close();
        drop(running);
    });
}

/// Copies bytes until input or output ends. Returns whether the input ended.
fn pump(input: &mut dyn Read, output: &mut dyn Write) -> bool {
    let mut bytes = vec![0; PUMP_BYTES];
    loop {
        match input.read(&mut bytes) {
            Ok(0) => return true,
            Ok(count) => {
                if output.write_all(&bytes[..count]).and_then(|()| output.flush()).is_err() {
                    return false;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return true,
        }
    }
}
