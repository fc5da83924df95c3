//! Rank hosts inside this test process, which start real rank processes.

use std::net::TcpListener;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use net::ClusterKey;
use ranks::group::Hosts;
use ranks::protocol::join::Activations;
use ranks::remote::{RankProcess, serve_ranks};
use ranks::worker;
use types::Rank;

/// Dropping this value ends the hosts and their ranks.
pub struct LocalRankHosts {
    pub hosts: Hosts,
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl LocalRankHosts {
    pub fn start(count: usize, environment: &[(String, String)]) -> Self {
        let key = ClusterKey::from_passphrase("a key that only tests have").unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let (mut addresses, mut threads) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            addresses.push(listener.local_addr().unwrap().to_string());
            let (key, is_over, environment) = (key.clone(), is_over.clone(), environment.to_vec());
            threads.push(thread::spawn(move || {
                let spawn = |rank| Ok(process(rank, &environment));
                serve_ranks(&listener, &key, spawn, || is_over.load(Ordering::SeqCst)).unwrap();
            }));
        }
        Self { hosts: Hosts { addresses, key, activations: Activations::F32 }, is_over, threads }
    }
}

impl Drop for LocalRankHosts {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }
}

fn process(rank: Rank, environment: &[(String, String)]) -> RankProcess {
    let mut command = worker::command(env!("CARGO_BIN_EXE_consort").as_ref(), rank, 0);
    command.envs(environment.iter().cloned()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let pid = child.id();
    let kill = move || {
        let _ = child.kill();
        child.wait().unwrap();
    };
    RankProcess { pid, stdin: Box::new(stdin), stdout: Box::new(stdout), kill: Box::new(kill) }
}
