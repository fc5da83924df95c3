//! The fault matrix of a chain: every fault of a machine, at every moment, in every place of the chain, with a spare machine
//! and without, while streams run. The machines are network namespaces, the processes `consort join` and `consort serve`.
//! Each stream must get exactly the text that it gets without a fault, the server must serve again, and the other machines
//! must hold nothing afterwards.
//!
//! A part of the matrix runs by default; `CONSORT_FAULT_MATRIX=all` runs all of it.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod cell;
mod lab;
mod link;
mod matrix;
mod streams;

use std::process::ExitCode;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use cell::{Cell, Outcome};
use lab::Lab;
use testing::needs;
use testing::network::Network;

/// Networks that are used at once: cells mostly wait.
const LABS: usize = 2;
/// The maximum time of a cell before it counts as hung.
const HANGS: Duration = Duration::from_secs(300);

fn main() -> ExitCode {
    if !(needs::namespaces() && needs::nftables()) {
        return ExitCode::SUCCESS;
    }
    let networks: Option<Vec<_>> = (0..LABS).map(|_| Network::new(lab::MACHINES)).collect();
    let Some(networks) = networks else { return ExitCode::SUCCESS };
    let cells = matrix::cells(std::env::var("CONSORT_FAULT_MATRIX").is_ok_and(|value| value == "all"));
    let expected = Arc::new(streams::texts_without_faults());
    let queue = Arc::new(Mutex::new(cells.clone().into_iter()));
    let (sender, outcomes) = channel::<(Cell, Outcome)>();
    let mut labs = Vec::new();
    for network in networks {
        let (queue, sender, expected) = (Arc::clone(&queue), sender.clone(), Arc::clone(&expected));
        labs.push(thread::spawn(move || {
            let mut lab = Lab::start(network);
            loop {
                let Some(cell) = queue.lock().unwrap().next() else { return };
                if sender.send((cell, cell.run(&mut lab, &expected))).is_err() {
                    return;
                }
            }
        }));
    }
    drop(sender);
    let mut found = Vec::new();
    while found.len() < cells.len()
        && let Ok(outcome) = outcomes.recv_timeout(HANGS)
    {
        eprintln!("{:>3}/{} {}: {}", found.len() + 1, cells.len(), outcome.0, outcome.1);
        found.push(outcome);
    }
    matrix::print_table(&found);
    let is_bad = |(_, outcome): &&(Cell, Outcome)| outcome.problem.is_some();
    let missing = cells.len() - found.len();
    // Their processes and namespaces end with them, unless one hangs.
    if missing == 0 {
        labs.into_iter().for_each(|lab| lab.join().unwrap());
    }
    let failures = found.iter().filter(is_bad).count() + missing;
    for (cell, Outcome { problem, .. }) in found.iter().filter(is_bad) {
        eprintln!("{cell}: {}", problem.as_deref().unwrap_or_default());
    }
    println!("{} cells, {failures} failures, {missing} without an outcome", cells.len());
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
