//! A leader that knows only the ops of the neuron protocol.

use serde_json::json;

use crate::rank::{Rank, ask_all, check_all, check_error, comm_id, load_dense};

#[test]
fn a_foreign_leader_drives_two_ranks_through_the_life_of_two_models() {
    let mut ranks: Vec<_> = (0..2).map(|rank| Rank::start(rank, 2)).collect();
    // Twice: the second group replaces the first.
    for attempt in 0..2 {
        check_all(&mut ranks, &json!({"op": "init", "comm_id": comm_id(attempt)}), &json!({"op": "init_ok"}));
        let sum = json!({"op": "nccl_sanity_result", "observed_sum": 2});
        check_all(&mut ranks, &json!({"op": "nccl_sanity_check"}), &sum);
    }
    for (architecture, id) in [("llama", "a"), ("qwen3_moe", "b")] {
        check_all(&mut ranks, &load_dense(architecture, id), &json!({"op": "load_dense_shard_ok"}));
        ask_all(&mut ranks, &load_dense(architecture, id))
            .iter()
            .for_each(|reply| check_error(reply, "already_loaded"));
    }
    let step = |id: &str, tokens: &[u32], offset: usize| json!({"op": "generate_step", "model_id": id, "tokens": tokens, "offset": offset});
    let done = json!({"op": "generate_step_ok"});
    for id in ["a", "b"] {
        check_all(&mut ranks, &step(id, &[1, 2, 3, 4, 5], 0), &done);
        check_all(&mut ranks, &step(id, &[6], 5), &done);
        check_all(&mut ranks, &step(id, &[7], 3), &done);
        for bad in [step(id, &[8], 6), step(id, &[u32::MAX], 0), step(id, &[], 0), step(id, &[1], usize::MAX)] {
            ask_all(&mut ranks, &bad).iter().for_each(|reply| check_error(reply, "forward_failed"));
        }
        check_all(&mut ranks, &step(id, &[8], 4), &done);
    }
    let cleared = json!({"op": "kv_cache_cleared"});
    check_all(&mut ranks, &json!({"op": "clear_kv_cache", "model_id": "a"}), &cleared);
    ask_all(&mut ranks, &step("a", &[1], 5)).iter().for_each(|reply| check_error(reply, "forward_failed"));
    check_all(&mut ranks, &step("a", &[1, 2], 0), &done);
    check_all(&mut ranks, &step("b", &[9], 5), &done);
    let images = json!({"op": "generate_step_with_images", "model_id": "a", "tokens": [1], "offset": 0,
        "image_token_id": 1, "image_data_uris": [], "chunk_size": 512});
    ask_all(&mut ranks, &images).iter().for_each(|reply| check_error(reply, "forward_failed"));
    for id in ["a", "b"] {
        check_all(&mut ranks, &json!({"op": "unload_model", "model_id": id}), &json!({"op": "unloaded"}));
        ask_all(&mut ranks, &step(id, &[1], 0)).iter().for_each(|reply| check_error(reply, "model_not_loaded"));
    }
    ranks.into_iter().for_each(Rank::shut_down);
}
