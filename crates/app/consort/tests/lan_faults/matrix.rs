//! Which cells run, and the table of their outcomes.

use crate::cell::{Cell, FaultKind, Moment, Outcome, STAGES};

/// All cells, or a part: every fault at each moment, in one place of the chain, with a spare or without.
pub fn cells(is_whole: bool) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (row, fault) in FaultKind::ALL.into_iter().enumerate() {
        for (column, moment) in Moment::ALL.into_iter().enumerate() {
            for stage in STAGES {
                for has_spare in [false, true] {
                    let is_sample = (row + column) % STAGES.len() == stage - 1
                        && (row + 2 * column).is_multiple_of(2) == has_spare
                        && (row + column).is_multiple_of(2);
                    if is_whole || is_sample {
                        cells.push(Cell { fault, moment, stage, has_spare });
                    }
                }
            }
        }
    }
    cells
}

/// Prints for each cell the longest time between two events of a stream, and the time of the whole cell.
pub fn print_table(found: &[(Cell, Outcome)]) {
    println!(
        "longest pause of a stream / the whole cell, in seconds, for a fault in the first, second and third stage"
    );
    for has_spare in [false, true] {
        println!("\n{}", if has_spare { "with a spare machine" } else { "without a spare machine" });
        let head: String = Moment::ALL.iter().map(|moment| format!("{:>34}", moment.name())).collect();
        println!("{:>10}{head}", "");
        for fault in FaultKind::ALL {
            let outcomes = Moment::ALL.map(|moment| {
                STAGES.map(|stage| {
                    let cell = Cell { fault, moment, stage, has_spare };
                    let outcome = found.iter().find(|(other, _)| *other == cell);
                    outcome.map_or("-".to_owned(), |(_, outcome)| outcome.to_string())
                })
            });
            let line: String = outcomes.iter().map(|outcomes| format!("{:>34}", outcomes.join(" | "))).collect();
            println!("{:>10}{line}", fault.name());
        }
    }
}
