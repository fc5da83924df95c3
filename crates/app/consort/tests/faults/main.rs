//! The fault matrix: every fault of a rank, at every stage of a group's life, on rank 0, on another rank, and on a rank on
//! another host, while requests run. Each request must get exactly the tokens that it gets without a fault, the group must
//! serve again, and no process or memory may be left. A watchdog ends a test that hangs.
//!
//! Each fault at each stage happens in one of the three places, or with `CONSORT_FAULT_MATRIX=all` in each.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod cell;
mod rank_hosts;
mod traces;

use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use cell::{Cell, Outcome};

const ACTIONS: [&str; 6] = ["kill", "stop", "garbage", "close_stdout", "oom", "slow"];
const MOMENTS: [&str; 7] = ["spawn", "init", "load", "prefill", "decode", "idle", "unload"];
/// The rank with the fault, and whether all ranks but the first are on other hosts.
const FAULT_PLACEMENTS: [(u16, bool); 3] = [(0, false), (1, false), (1, true)];
/// Cells that run at once: they mostly wait.
const WORKERS: usize = 4;
/// The maximum time of a cell before it counts as hung.
const WATCHDOG: Duration = Duration::from_secs(180);

fn main() -> ExitCode {
    let expected = Arc::new(cell::answers_without_faults());
    let cells = cells(std::env::var("CONSORT_FAULT_MATRIX").is_ok_and(|value| value == "all"));
    let next = Arc::new(AtomicUsize::new(0));
    let outcomes = Arc::new(Mutex::new(vec![None; cells.len()]));
    let (done, all) = channel();
    for _ in 0..WORKERS {
        let (cells, next, outcomes) = (cells.clone(), next.clone(), outcomes.clone());
        let (expected, done) = (expected.clone(), done.clone());
        thread::spawn(move || {
            while let Some(&cell) = cells.get(next.fetch_add(1, Ordering::Relaxed)) {
                let index = cells.iter().position(|&other| other == cell).unwrap();
                let outcome = cell.run(&expected);
                outcomes.lock().unwrap()[index] = Some(outcome);
                done.send(()).unwrap();
            }
        });
    }
    drop(done);
    let mut last = Instant::now();
    let mut count = 0;
    while count < cells.len() {
        match all.recv_timeout(WATCHDOG) {
            Ok(()) => (count, last) = (count + 1, Instant::now()),
            Err(_) => break,
        }
    }
    let outcomes = outcomes.lock().unwrap().clone();
    print_table(&cells, &outcomes);
    let mut failures = 0;
    for (cell, outcome) in cells.iter().zip(&outcomes) {
        match outcome {
            Some(Outcome { problem: None, .. }) => continue,
            Some(Outcome { problem: Some(problem), .. }) => eprintln!("{cell}: {problem}"),
            None => eprintln!("{cell}: no outcome, {:.0} s after the last one", last.elapsed().as_secs_f64()),
        }
        failures += 1;
    }
    if count == cells.len() {
        for left in traces::of_this_program() {
            eprintln!("left behind: {left}");
            failures += 1;
        }
    }
    println!("{} cells, {failures} failures", cells.len());
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn cells(has_all: bool) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (row, action) in ACTIONS.into_iter().enumerate() {
        for (column, moment) in MOMENTS.into_iter().enumerate() {
            for (place, (rank, remote)) in FAULT_PLACEMENTS.into_iter().enumerate() {
                if has_all || (row + column) % FAULT_PLACEMENTS.len() == place {
                    cells.push(Cell { action, moment, rank, remote });
                }
            }
        }
    }
    cells
}

/// Prints for each cell: restarted processes, requeued requests, the longest time from the loss until the last survivor left
/// the step, and the time of the whole cell.
fn print_table(cells: &[Cell], outcomes: &[Option<Outcome>]) {
    println!("restarts / replays / drain ms / s, for rank 0 and rank 1 of 3, and for rank 1 on another host");
    print!("{:>14}", "");
    MOMENTS.iter().for_each(|moment| print!("{moment:>44}"));
    println!();
    for action in ACTIONS {
        print!("{action:>14}");
        for moment in MOMENTS {
            let of = |(rank, remote)| {
                let index = cells.iter().position(|cell| *cell == Cell { action, moment, rank, remote });
                index.map_or("-".to_owned(), |index| {
                    outcomes[index].as_ref().map_or("hung".to_owned(), Outcome::to_string)
                })
            };
            print!("{:>44}", FAULT_PLACEMENTS.map(of).join(" | "));
        }
        println!();
    }
}
