//! `-h` and `--help`, and options by the names that people know from other programs.

use serde_json::Value;

use crate::{check_refused, oracle, succeed};

const HEADINGS: [&str; 6] = ["Model", "Sampling", "This machine", "Machines of mine", "Swarm", "Server"];

fn long_options(help: &str) -> Vec<&str> {
    let lines = help.lines().filter(|line| line.trim_start().starts_with('-'));
    lines.filter_map(|line| line.split([' ', ',', '=', '[']).find(|word| word.starts_with("--"))).collect()
}

#[test]
fn short_help_has_the_options_that_people_use_and_says_where_the_rest_is() {
    for command in ["run", "chat", "serve"] {
        let (short, long) = (succeed(&[command, "-h"]), succeed(&[command, "--help"]));
        let (used, all) = (long_options(&short), long_options(&long));
        assert!((8..=18).contains(&used.len()), "{command}: {used:?}");
        assert!(used.iter().all(|option| all.contains(option)) && all.len() > 2 * used.len(), "{command}: {all:?}");
        for option in ["--model", "--context", "--threads", "--cluster", "--help"] {
            assert!(used.contains(&option), "{command}: {option} is not in {used:?}");
        }
        assert!(short.contains("--help shows all") && !long.contains("--help shows all"), "{short}");
        assert!(!used.contains(&"--decode-math") && all.contains(&"--decode-math"), "{command}");
    }
    assert!(long_options(&succeed(&["serve", "-h"])).contains(&"--port"));
}

#[test]
fn help_has_all_options_under_a_few_headings() {
    for command in ["run", "chat", "serve", "plan", "bench", "show"] {
        let help = succeed(&[command, "--help"]);
        let headings = help.lines().filter(|line| !line.starts_with(' ')).filter_map(|line| line.strip_suffix(':'));
        for heading in headings {
            assert!(HEADINGS.contains(&heading) || ["Options", "Arguments"].contains(&heading), "{command}: {heading}");
        }
    }
    let serve = succeed(&["serve", "--help"]);
    let places: Vec<_> = HEADINGS.iter().filter_map(|heading| serve.find(&format!("\n{heading}:\n"))).collect();
    // What is under Sampling is in the requests.
    assert!(places.is_sorted() && places.len() == 5, "{places:?}");
    let section =
        |heading: &str| serve.split(&format!("\n{heading}:\n")).nth(1).unwrap().split("\n\n  ").next().unwrap();
    assert!(section("Model").contains("--model") && section("Server").contains("--host"), "{serve}");
}

#[test]
fn what_is_for_developers_is_not_listed() {
    let help = succeed(&["--help"]);
    assert!(help.contains("  serve ") && !help.contains("debug"), "{help}");
    assert!(succeed(&["debug", "--help"]).contains("tokens"), "it works nevertheless");
}

#[test]
fn options_have_the_names_that_people_know() {
    let model = oracle("llama/model-f32");
    let tokens = |args: &[&str]| {
        let report: Value = serde_json::from_str(&succeed(&[&["run", "--json", "--raw"], args].concat())).unwrap();
        (report["tokens"].clone(), report["prompt_tokens"].clone())
    };
    let own = [&model, "Morning near", "--temperature", "0", "--max-tokens", "4", "--context", "64"];
    let expected = tokens(&own);
    assert_eq!(expected.0.as_array().unwrap().len(), 4);
    for known in [
        &["-m", &model, "-p", "Morning near", "--temp", "0", "-n", "4", "-c", "64"][..],
        &["--model", &model, "Morning near", "--temp", "0", "--n-predict", "4", "--ctx-size", "64", "-t", "1"],
        &[&model, "--prompt", "Morning near", "--temp", "0", "--predict", "4", "--max-model-len", "64"],
        &["-m", &model, "Morning near", "--temp=0", "-n4", "-c64", "--tensor-parallel-size", "1"],
    ] {
        assert_eq!(tokens(known), expected, "{known:?}");
    }
    check_refused(&["run", "-m", &model, "-p", "a", "b"], 2, "`b` is one word too many");
    check_refused(&["run", "-m", &model, "a", "b"], 2, "`b` is one word too many");
    check_refused(&["chat", "-m", &model, &model], 2, "cannot be used with");

    let name = |json: &str| serde_json::from_str::<Value>(json).unwrap()["name"].clone();
    assert_eq!(name(&succeed(&["show", "-m", &model, "--json"])), "model-f32");
    check_refused(&["show"], 2, "required");
    let measured = succeed(&["bench", "-m", &model, "-p", "8", "-n", "2", "-r", "1", "--json", "-c", "64"]);
    assert_eq!(measured.lines().count(), 2, "{measured}");
    assert_eq!(succeed(&["ls"]), succeed(&["list"]));
}
