//! `run`: the prompt from arguments and pipes, and wrong usage.

use std::fs;

use serde_json::Value;

use crate::{check_refused, oracle, piped, text};

const OPTIONS: [&str; 6] = ["--raw", "--json", "--temperature", "0", "--max-tokens", "4"];

/// The tokens of the answer and the number of prompt tokens.
fn answer(words: &[&str], input: &str) -> (Value, Value) {
    let output = piped(&[&["run"], words, &OPTIONS].concat(), input.as_bytes());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    (report["tokens"].clone(), report["prompt_tokens"].clone())
}

#[test]
fn standard_input_is_the_prompt_or_follows_it() {
    let model = oracle("llama/model-f32");
    let model = model.as_str();
    let whole = answer(&[model, "Morning near\n\noften"], "");
    assert_eq!(answer(&[model, "Morning near"], "often\n"), whole);
    assert_eq!(answer(&[model], "Morning near\n\noften\n"), whole);
    assert_eq!(answer(&[model, "-"], "Morning near\n\noften\n"), whole);
    assert_ne!(answer(&[model, "Morning near"], ""), whole);
}

#[test]
fn a_prompt_that_is_missing_is_wrong_usage() {
    let model = oracle("llama/model-f32");
    check_refused(&["run"], 2, "a prompt is missing");
    check_refused(&["run", &model], 2, "`consort chat");
    check_refused(&["run", "owner/name"], 2, "owner/name is a model, and a prompt is missing");
    check_refused(&["run", &model, "-"], 2, "the prompt is empty");
    let superfluous = ["run", &model, "question", "--temperature", "0", "another"];
    check_refused(&superfluous, 2, "`another` is one word too many: the prompt is `question`");
    check_refused(&["run", "Why", "is", "the", "sky", "blue?"], 2, "`the` is one word too many");
    check_refused(&["chat", &model, "--temperature", "0", "another"], 2, "another");
    let binary = piped(&["run", &model, "x"], b"\xff\xfe");
    assert_eq!(binary.status.code(), Some(1));
    assert!(text(&binary.stderr).contains("not text in UTF-8"), "{}", text(&binary.stderr));
}

#[test]
fn numbers_out_of_range_are_refused_in_words() {
    let model = oracle("llama/model-f32");
    for (option, value, why) in [
        ("--temperature", "-1", "it must be from 0 to 1000"),
        ("--temperature", "hot", "it must be a number"),
        ("--temperature", "nan", "it must be from 0 to 1000"),
        ("--top-p", "7", "it must be above 0 and at most 1"),
        ("--top-p", "0", "it must be above 0 and at most 1"),
        ("--min-p", "-0.5", "it must be from 0 to 1"),
        ("--top-k", "-1", "it must be a whole number from 0 on"),
        ("--seed", "-1", "it must be a whole number from 0 on"),
        ("--max-tokens", "-1", "it must be a whole number from 0 on"),
        ("--context", "-1", "it must be a number from 1 on"),
        ("--chunk", "0", "it must be a number from 1 on"),
        ("--threads", "-1", "it must be a number from 1 on"),
        ("--tensor-parallel", "-1", "it must be a number from 1 to"),
    ] {
        let refused = check_refused(&["run", &model, "x", option, value], 2, why);
        assert!(refused.contains(option) && refused.contains(value), "{refused}");
    }
}

/// Also before a model is looked for, which may have to be downloaded.
#[test]
fn options_that_contradict_each_other_are_wrong_usage() {
    let model = oracle("llama/model-f32");
    check_refused(&["chat", "no/where", "--tensor-parallel", "4", "--tp-hosts", "a:1"], 2, "does not fit --tp-hosts");
    let debug = ["debug", "tokens", "no/where", "--tokens", "1"];
    for command in [&["run", "no/where", "x"][..], &["chat", "no/where"], &["serve", "no/where", "--port", "0"], &debug]
    {
        for (options, why) in [
            (&["--compute", "f32", "--quant", "q8_0"][..], "exclude each other"),
            (&["--tp-hosts", "127.0.0.1:1"], "--cluster-key-file"),
        ] {
            let refused = check_refused(&[command, options].concat(), 2, why);
            assert!(!refused.contains("listening"), "{refused}");
        }
        let options = ["--tp-hosts", "127.0.0.1:1", "--cluster-key-file", "/no/where"];
        check_refused(&[command, &options].concat(), 1, "read the cluster's key from /no/where");
    }
    check_refused(&["run", &model, "x", "--context", "99999999"], 2, "more than the");
    check_refused(&["serve", &model, "--port", "0", "--context", "64", "--kv-tokens", "32"], 2, "a larger --kv-tokens");
    check_refused(&["bench", &model, "-p", "0", "-n", "0"], 2, "nothing to measure");
}

#[test]
fn an_error_names_a_path_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad.gguf");
    fs::write(&file, "nothing").unwrap();
    let broken = folder.path().join("broken");
    fs::create_dir(&broken).unwrap();
    fs::write(broken.join("config.json"), "{").unwrap();
    let untold = folder.path().join("untold");
    fs::create_dir(&untold).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(oracle(&format!("llama/model-f32/{name}")), untold.join(name)).unwrap();
    }
    for (path, why) in [(&file, "not a GGUF"), (&broken, "not valid JSON"), (&untold, "No such file")] {
        let path = path.to_str().unwrap();
        for args in [&["run", path, "x"][..], &["chat", path]] {
            let refused = check_refused(args, 1, why);
            assert_eq!(refused.matches(path).count(), 1, "{refused}");
            assert_eq!(refused.lines().count(), 1, "{refused}");
        }
        let refused = check_refused(&["serve", path, "--port", "0"], 1, why);
        assert_eq!(refused.lines().last().unwrap().matches(path).count(), 1, "{refused}");
    }
}

#[test]
fn the_speed_is_told_on_standard_error_if_asked_for() {
    let model = oracle("llama/model-f32");
    let args = ["run", &model, "Hello", "--temperature", "0", "--max-tokens", "8"];
    let plain = piped(&args, b"");
    assert!(plain.status.success() && plain.stderr.is_empty(), "{}", text(&plain.stderr));
    let told = piped(&[&args[..], &["--stats"]].concat(), b"");
    assert_eq!(told.stdout, plain.stdout);
    let line = text(&told.stderr);
    assert!(line.starts_with("8 tokens, ") && line.contains(" tokens/s, time to first token "), "{line}");
    assert!(!line.contains('\u{1b}'), "{line}");
}

#[test]
fn a_full_context_is_told() {
    let model = oracle("llama/model-f32");
    let args = ["run", &model, "Hello", "--temperature", "0", "--context", "64"];
    let cut = piped(&args, b"");
    assert!(text(&cut.stderr).contains("(cut off: the context of 64 tokens is full"), "{}", text(&cut.stderr));
    let asked = piped(&[&args[..], &["--max-tokens", "2"]].concat(), b"");
    assert_eq!(text(&asked.stderr), "");
}
