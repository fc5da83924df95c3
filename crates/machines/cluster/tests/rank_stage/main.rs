//! Stages whose layers are shared by two rank processes, in chains of two to four stages on loopback: the tokens of one process,
//! logits within the tolerance of tensor parallelism, the same bits from run to run, also when ranks are killed. Without a test
//! harness: ranks are this program, started again as `--worker`.
#![cfg_attr(not(target_os = "linux"), allow(unused))]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

#[cfg(target_os = "linux")]
mod killing;
#[cfg(target_os = "linux")]
mod range;
#[cfg(target_os = "linux")]
mod rank;
#[cfg(target_os = "linux")]
mod same_tokens;

fn main() {
    #[cfg(target_os = "linux")]
    linux_main();
}

#[cfg(target_os = "linux")]
fn linux_main() {
    if rank::serve_if_asked() {
        return;
    }
    let tests: [(&str, fn()); 7] = [
        ("a_chain_with_a_stage_of_two_ranks_gives_the_tokens_of_one_process", same_tokens::all_models),
        ("the_stage_of_two_ranks_may_be_any_of_up_to_four", same_tokens::every_place),
        ("a_chain_over_a_range_with_a_stage_of_two_ranks_gives_the_states_of_one_process", range::middle_layers),
        ("a_model_that_ranks_cannot_share_runs_elsewhere", same_tokens::unshared),
        ("an_exact_stage_runs_in_one_process", same_tokens::exact),
        ("answers_stay_the_same_when_a_rank_is_killed", killing::at_work),
        ("a_rank_that_is_killed_while_idle_is_replaced", killing::idle),
    ];
    for (name, test) in tests {
        print!("test {name} ... ");
        test();
        println!("ok");
    }
}
