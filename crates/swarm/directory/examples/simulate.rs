//! Simulated swarms of 100, 1,000 and 10,000 peers in virtual time: what a look-up and a plan cost a client, how near
//! the plan is to the best, how balanced the swarm is under churn, and how often peers move.
//!
//!     cargo run --release -p directory --example simulate

use std::collections::HashSet;
use std::hint::black_box;
use std::time::{Duration, Instant};

use directory::{Reputation, RouteLimits, RoutePlanner};
use testing::simulation::{Churn, LAYERS, MINUTE_MS, MODEL, Random, Site, World, request};

const HOUR_MS: u64 = 60 * MINUTE_MS;
const CLIENTS: usize = 21;
/// A search without limits over 10,000 peers takes seconds.
const CLIENTS_WITHOUT_LIMITS: usize = 3;

fn main() {
    println!("model of {LAYERS} layers, blocks of 4 to 16; a peer stays for an hour on average, half of them crash");
    println!(
        "| peers | coverage ms | plan ms | replace ms | over the best | balance mean | least | ticks with a gap | \
         moves per hour | coordinate error |"
    );
    println!("|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|");
    for peers in [100, 1000, 10_000] {
        let mut world = World::new(peers, Churn { stay_ms: Some(HOUR_MS) }, peers as u64);
        world.run(HOUR_MS / 2);
        world.reset_metrics();
        world.run(HOUR_MS);
        let (balance, least, gaps) = (world.mean_balance(), world.least_balance(), world.gaps);
        let moves = world.moves;
        let times = plans(&mut world);
        let error = world.coordinate_error();
        println!(
            "| {peers} | {:.2} | {:.2} | {:.2} | {:.2} % | {balance:.2} | {least:.2} | {gaps} | {moves} | {:.0} % |",
            milliseconds(times.coverage),
            milliseconds(times.plan),
            milliseconds(times.replace),
            100.0 * times.excess,
            100.0 * error,
        );
    }
}

struct Times {
    coverage: Duration,
    plan: Duration,
    replace: Duration,
    /// By how much the chains are predicted to be slower than those of a search without limits, on average.
    excess: f64,
}

/// Medians over clients at random places.
fn plans(world: &mut World) -> Times {
    let mut random = Random(9);
    let (reputation, nobody) = (Reputation::new(), HashSet::new());
    let (mut coverages, mut planned, mut replaced, mut excess) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for number in 0..CLIENTS {
        let site = Site::random(&mut random);
        let client = world.client(&site);
        let (directory, now) = (&world.directory, world.now);
        coverages.push(time(|| directory.coverage(&MODEL, LAYERS, now)).1);
        let planner = |limits| RoutePlanner { directory, reputation: &reputation, client: &client, now, limits };
        let limited = planner(RouteLimits::default());
        let (chain, took) = time(|| limited.plan(&request(&nobody)));
        planned.push(took);
        let Ok(chain) = chain else { continue };
        if number < CLIENTS_WITHOUT_LIMITS {
            let everything = RouteLimits { candidates_per_layer: usize::MAX, exits_per_layer: usize::MAX };
            let best = planner(everything).plan(&request(&nobody)).expect("there is a chain");
            excess.push(chain.token_seconds / best.token_seconds - 1.0);
        }
        let lost = chain.spans[chain.spans.len() / 2];
        let excluded = HashSet::from([lost.peer]);
        replaced.push(time(|| limited.replace(&request(&excluded), &chain, lost.layers)).1);
    }
    let mean = excess.iter().sum::<f64>() / excess.len().max(1) as f64;
    Times { coverage: median(coverages), plan: median(planned), replace: median(replaced), excess: mean }
}

fn time<T>(run: impl FnOnce() -> T) -> (T, Duration) {
    let begun = Instant::now();
    let result = black_box(run());
    (result, begun.elapsed())
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
