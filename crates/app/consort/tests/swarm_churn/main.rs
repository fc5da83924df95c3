//! A swarm whose peers join, leave, are killed, stopped, cut off and healed at random, while eight clients stream completions.
//! The machines are network namespaces, the processes `consort swarm serve` and `consort serve --swarm`. Every request must get
//! exactly the text that it gets without a disturbance, or an error with a code if there were no peers for all layers. When all
//! peers are there again and the clients are gone, nothing must be left behind.
//!
//! It runs for a minute; `CONSORT_CHURN_SECONDS` is another time, `CONSORT_CHURN_SEED` has the same happen as in another run.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod churn;
mod clients;
mod coverage;
mod peer;
mod random;

use std::collections::BTreeMap;
use std::env;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use churn::Churn;
use clients::Tally;
use coverage::Coverage;
use peer::{BLOCKS, BOOTSTRAP_PEERS, Holdings, KV_TOKENS, MODEL, Peer, field};
use serde_json::Value;
use testing::bounded::{ended, wait_until};
use testing::network::Network;
use testing::oracle;
use testing::serving::{Server, consort, text};

const SECONDS: u64 = 60;
/// How long requests wait for a chain.
const REPLAY: Duration = Duration::from_secs(10);
/// By how much the memory of a process may have grown: buffers and arenas of the allocator, but nothing that adds up.
const MEMORY_GROWTH_MIB_MAX: usize = 64;
/// Connections of a peer to another one, or to the server: TCP and QUIC, made by both sides.
const FILES_PER_PEER: usize = 4;

fn main() -> ExitCode {
    let Some(network) = Network::new(BLOCKS.len()) else { return ExitCode::SUCCESS };
    let number = |name: &str| env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seconds = number("CONSORT_CHURN_SECONDS").unwrap_or(SECONDS);
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = number("CONSORT_CHURN_SEED").unwrap_or(since.as_millis() as u64);
    println!("{seconds} s, CONSORT_CHURN_SEED={seed}");
    let problems = run(&network, Duration::from_secs(seconds), seed);
    problems.iter().for_each(|problem| eprintln!("PROBLEM: {problem}"));
    println!("{} problems", problems.len());
    if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(network: &Network, time: Duration, seed: u64) -> Vec<String> {
    let expected = clients::undisturbed(MODEL);
    let folder = tempfile::tempdir().unwrap();
    let (mut peers, mut bootstrap) = (Vec::new(), Vec::new());
    for index in network.others() {
        let peer = Peer::start(network, index, folder.path().to_owned(), &bootstrap);
        if index <= BOOTSTRAP_PEERS {
            bootstrap.push(peer.address());
        }
        peers.push(peer);
    }
    let through = bootstrap.join(",");
    let replay = REPLAY.as_secs().to_string();
    let options = ["--swarm", "--no-lan", "--bootstrap", &through, "--served-model-name", "m", "--replay", &replay];
    let model = oracle(MODEL);
    let mut server = network.within(0, || {
        let server = Server::listen("true", model.to_str().unwrap(), &options, &[]);
        server.wait_until_ready();
        server
    });
    // Before anything happens, so that threads and buffers of the first requests count as idle ones.
    let (coverage, is_over) = (Coverage::default(), AtomicBool::new(true));
    let idle = Holdings::of(server.child.id());
    let blocks: Vec<_> = peers.iter().filter_map(Peer::layers).collect();
    println!("blocks {blocks:?}");

    is_over.store(false, Ordering::Release);
    let (events, churned, tally) = thread::scope(|scope| {
        let clients = scope.spawn(|| clients::run(network, &server.address, &expected, &coverage, &is_over));
        let mut churn = Churn::new(network, &mut peers, &bootstrap, &coverage, seed);
        let churned = churn.run(time);
        is_over.store(true, Ordering::Release);
        (churn.events, churned, clients.join().unwrap())
    });
    let log = server.log.so_far();
    if !tally.problems.is_empty() || churned.is_err() {
        eprintln!("the server's log:\n{log}");
    }
    print_counts(&tally, &events, &log, coverage.gaps());
    let mut problems = tally.problems;
    problems.extend(churned.err());
    if tally.completed == 0 {
        problems.push("no request was completed: the run shows nothing".to_owned());
    }
    problems.extend(check_server(&mut server, idle, peers.len()));
    problems.extend(check_peers(network, &mut peers, &through));
    problems
}

fn print_counts(tally: &Tally, events: &BTreeMap<&str, usize>, log: &str, gaps: (usize, Duration)) {
    let Tally { requests, completed, tokens, errors, longest, .. } = tally;
    println!("requests {requests}, completed {completed} with {tokens} tokens, the longest took {longest:.1?}");
    println!("errors by code: {errors:?}");
    println!("events: {events:?}");
    println!("times without a chain: {}, {:.1?} together", gaps.0, gaps.1);
    let mut losses = BTreeMap::<&str, usize>::new();
    for line in log.lines().filter(|line| line.contains("a span of a chain is replaced")) {
        let (_, loss) = line.split_once("loss=").unwrap_or_default();
        *losses.entry(loss).or_default() += 1;
    }
    println!("spans replaced: {}", losses.values().sum::<usize>());
    losses.iter().for_each(|(loss, count)| println!("  {count:>5}  {loss}"));
    let without = log.lines().filter(|line| line.contains("a session found no chain")).count();
    println!("sessions without a chain: {without}");
}

/// Waits until the process holds what it held before, and `files` more at most.
fn check_holdings(who: &str, pid_of: impl Fn() -> (Holdings, Holdings), files: usize) -> Option<String> {
    wait_until(&format!("{who} has its threads and files back"), || {
        let (now, idle) = pid_of();
        now.threads <= idle.threads && now.files <= idle.files + files
    });
    let (now, idle) = pid_of();
    println!("{who}: {idle:?} before, {now:?} after");
    let has_grown = now.memory_mib > idle.memory_mib + MEMORY_GROWTH_MIB_MAX;
    has_grown
        .then(|| format!("{who} has grown by more than {MEMORY_GROWTH_MIB_MAX} MiB: {idle:?} before, {now:?} after"))
}

fn check_server(server: &mut Server, idle: Holdings, peers: usize) -> Vec<String> {
    let pid = server.child.id();
    let problem = check_holdings("the server", || (Holdings::of(pid), idle), FILES_PER_PEER * peers);
    server.signal("TERM");
    let code = ended(&mut server.child).code();
    let ended = (code != Some(0)).then(|| format!("the server ended with {code:?}: {}", server.log.so_far()));
    problem.into_iter().chain(ended).collect()
}

/// The server has ended: no peer has a session.
fn check_peers(network: &Network, peers: &mut [Peer], bootstrap: &str) -> Vec<String> {
    let mut problems = Vec::new();
    for peer in &*peers {
        let who = format!("peer {}", peer.index);
        problems.extend(check_holdings(&who, || peer.holdings().unwrap(), FILES_PER_PEER * peers.len()));
    }
    wait_until("all K/V tokens of all peers are free", || {
        let free = free_tokens(network, bootstrap);
        free.len() >= peers.len() && free.iter().all(|tokens| *tokens == KV_TOKENS)
    });
    let others = peers.len() - 1;
    for peer in peers {
        match peer.leave() {
            Err(problem) => problems.push(problem),
            Ok(line) => {
                let [sessions, streams, keys] =
                    ["sessions", "streams", "push_keys"].map(|name| field(&line, name).parse::<usize>().unwrap());
                // Of each other peer a stream may be left in which it passed rows on.
                if sessions > 0 || keys > 0 || streams > others {
                    problems.push(format!("peer {} left with {line}", peer.index));
                }
            }
        }
    }
    problems
}

/// Of each block in the swarm, as `consort swarm status` tells.
fn free_tokens(network: &Network, bootstrap: &str) -> Vec<usize> {
    let args = ["swarm", "status", "--json", "--no-lan", "--bootstrap", bootstrap, "--wait", "3"];
    let output = network.within(0, || testing::bounded::output(&mut consort(&args)));
    assert!(output.status.success(), "{}", text(&output.stderr));
    let status: Value = serde_json::from_slice(&output.stdout).unwrap();
    let free = status["blocks"].as_array().unwrap().iter().map(|block| block["kv_tokens_free"].as_u64().unwrap());
    free.map(|tokens| tokens as usize).collect()
}
