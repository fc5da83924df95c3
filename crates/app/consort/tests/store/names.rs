//! Names of models, through the binary: one name everywhere, near misses, aliases, and `search`.

use std::fs;

use serde_json::Value;

use super::fake_hub::{COMMIT, FakeHub, HubFile, Reply};
use super::{Home, REPO, gguf, outcome};

/// Puts a model that runs into the cache, as if it had been fetched.
fn fetched(home: &Home, repo: &str, file: &str) {
    let folder = home.folder.path().join("hub").join(format!("models--{}", repo.replace('/', "--")));
    let snapshot = folder.join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(folder.join("refs")).unwrap();
    fs::write(folder.join("refs/main"), COMMIT).unwrap();
    fs::copy(testing::oracle("qwen3/gguf/tiny-qwen3-q8_0.gguf"), snapshot.join(file)).unwrap();
}

fn name_in(json: &str, key: &str) -> String {
    let value: Value = serde_json::from_str(json).unwrap();
    value[key].as_str().unwrap().to_owned()
}

#[test]
fn a_model_has_one_name_in_every_command() {
    let hub = FakeHub::of([("Qwen/Qwen3-4B-GGUF", vec![HubFile::large("Qwen3-4B-Q4_K_M.gguf", 900)])]);
    let home = Home::new(&hub);
    let pull = home.run(&["pull", "Qwen/Qwen3-4B-GGUF"]);
    assert!(pull.stdout.starts_with("qwen3:4b\t"), "{}{}", pull.stdout, pull.stderr);

    fetched(&home, "Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf");
    fetched(&home, "maker/tiny", "tiny-q8_0.gguf");
    let list = home.run(&["list", "--json"]).stdout;
    assert_eq!(list.lines().map(|line| name_in(line, "name")).collect::<Vec<_>>(), ["maker/tiny:Q8_0", "qwen3:4b"]);
    for (spellings, name) in [
        (["qwen3", "QWEN3:4b", "hf.co/qwen/qwen3-4b-gguf:Q4_K_M"], "qwen3:4b"),
        (["maker/tiny", "maker/tiny:q8_0", "https://huggingface.co/maker/tiny/tree/main"], "maker/tiny:Q8_0"),
    ] {
        for spelling in spellings {
            let show = home.run(&["show", spelling, "--json"]);
            assert_eq!(name_in(&show.stdout, "name"), name, "{}", show.stderr);
            let run = home.run(&["run", spelling, "Hello", "--raw", "--json", "--max-tokens", "1"]);
            assert_eq!(name_in(&run.stdout, "model"), name, "{}", run.stderr);
        }
    }
    let file = testing::oracle("qwen3/gguf/tiny-qwen3-q8_0.gguf");
    let run = home.run(&["run", file.to_str().unwrap(), "Hello", "--raw", "--json", "--max-tokens", "1"]);
    assert_eq!(name_in(&run.stdout, "model"), "tiny-qwen3-q8_0", "{}", run.stderr);
    // `rm` takes the name that `list` prints.
    assert!(home.run(&["rm", "qwen3:4b"]).success);
    assert_eq!(home.run(&["list", "--json"]).stdout.lines().count(), 1);
}

#[test]
fn every_command_takes_an_alias_and_rm_deletes_only_the_alias() {
    let home = Home::new(&FakeHub::honest(REPO, &[]));
    fetched(&home, "maker/tiny", "tiny-q8_0.gguf");
    let folder = home.folder.path().join("config/consort");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("aliases.json"), r#"{"mine":"maker/tiny:Q8_0"}"#).unwrap();
    let show = home.run(&["show", "mine", "--json"]);
    assert_eq!(name_in(&show.stdout, "name"), "maker/tiny:Q8_0", "{}", show.stderr);
    // A single word that is an alias is a model and no prompt.
    assert!(home.run(&["run", "mine"]).stderr.contains("mine is a model, and a prompt is missing"));
    let list = home.run(&["list"]);
    assert!(list.stdout.contains("also mine"), "{}", list.stdout);
    let rm = home.run(&["rm", "mine:latest"]);
    assert!(rm.success && rm.stdout == "deleted the alias mine:latest\n", "{}{}", rm.stdout, rm.stderr);
    let list: Value = serde_json::from_str(&home.run(&["list", "--json"]).stdout).unwrap();
    assert_eq!((&list["name"], &list["aliases"]), (&"maker/tiny:Q8_0".into(), &Value::Array(Vec::new())));
    assert!(!home.run(&["show", "mine"]).success);
}

#[test]
fn an_error_names_the_model_and_what_is_here() {
    let hub = FakeHub::honest(REPO, &[gguf()]);
    let home = Home::new(&hub);
    let offline = |args: &[&str]| outcome(home.command(args).env("HF_HUB_OFFLINE", "1")).stderr;
    let none = offline(&["run", "qwen3", "Hello"]);
    assert!(none.contains("qwen3:4b is not on this machine, and HF_HUB_OFFLINE is set"), "{none}");
    assert!(none.trim_end().ends_with("; no model is here"), "{none}");
    fetched(&home, "maker/tiny", "tiny-q8_0.gguf");
    let one = offline(&["run", "qwen3", "Hello"]);
    assert!(one.trim_end().ends_with("; here is maker/tiny:Q8_0"), "{one}");
    let here = offline(&["pull", "maker/tiny"]);
    assert!(here.contains("maker/tiny is here, but whether there is a newer version is not known"), "{here}");
    for (name, near) in [("qwen3-4b", "qwen3:4b"), ("maker/tinny:Q8_0", "maker/tiny:Q8_0")] {
        let shown = home.run(&["show", name]).stderr;
        assert!(shown.trim_end().ends_with(&format!("; did you mean `{near}`?")), "{shown}");
    }
    assert!(hub.requests().is_empty());
}

#[test]
fn a_search_lists_the_catalogue_and_then_the_hub() {
    let hub = FakeHub::of([
        ("maker/gemma3-tuned", vec![gguf()]),
        ("other/gemma3", vec![gguf()]),
        ("ggml-org/gemma3-4b", vec![gguf()]),
    ]);
    let home = Home::new(&hub);
    let table = home.run(&["search", "gemma3"]).stdout;
    let at = |words: &str| table.find(words).unwrap_or_else(|| panic!("`{words}` is not in:\n{table}"));
    assert!(
        at("CATALOGUE") < at("gemma3:270m") && at("gemma3:27b") < at("HUB") && at("HUB") < at("maker/gemma3-tuned")
    );
    let rows = home.run(&["search", "gemma3", "--json", "--limit", "2"]).stdout;
    let rows: Vec<Value> = rows.lines().map(|row| serde_json::from_str(row).unwrap()).collect();
    let of = |source: &str| rows.iter().filter(|row| row["source"] == source).collect::<Vec<_>>();
    assert!(of("catalogue").iter().any(|row| row["name"] == "gemma3:4b" && row["download_bytes"] == 2_490_000_000_u64));
    let found = of("hub");
    assert_eq!((found.len(), &found[0]["name"]), (2, &"maker/gemma3-tuned".into()));
    assert_eq!((&found[0]["runs"], &found[0]["downloads"]), (&true.into(), &1.into()));
    assert!(hub.requests()[0].path.starts_with("/api/models?search=gemma3&filter=gguf&sort=downloads"));

    // A word of which the catalogue knows nothing, and one of which nobody does.
    assert!(home.run(&["search", "tuned"]).stdout.contains("maker/gemma3-tuned"));
    let nothing = home.run(&["search", "no such"]);
    assert!(!nothing.success && nothing.stderr.contains("nothing is called `no such`"), "{}", nothing.stderr);
    // The whole catalogue, without the hub.
    let asked = hub.requests().len();
    assert!(home.run(&["search"]).stdout.contains("smollm2:135m"));
    assert_eq!(hub.requests().len(), asked);
}

#[test]
fn a_search_works_without_a_hub_as_far_as_it_can() {
    let hub = FakeHub::start(REPO, &[], |_| Some(Reply::new(500, "")));
    let home = Home::new(&hub);
    let known = home.run(&["search", "mistral"]);
    assert!(known.success && known.stdout.contains("mistral:7b"), "{}", known.stderr);
    assert!(
        known.stderr.contains("the hub was not searched: ") && known.stderr.contains("HTTP 500"),
        "{}",
        known.stderr
    );
    assert!(!home.run(&["search", "unheard-of"]).success);
    for body in ["<html>", "{}", "[{\"id\":7}]"] {
        let hub = FakeHub::start(REPO, &[], move |_| Some(Reply::new(200, body)));
        let refused = Home::new(&hub).run(&["search", "unheard-of"]);
        assert!(!refused.success && refused.stderr.contains("search results that make no sense"), "{}", refused.stderr);
    }
    let hub = FakeHub::start(REPO, &[], |_| Some(Reply { endless: true, ..Reply::new(200, vec![b' '; 65_536]) }));
    let refused = Home::new(&hub).run(&["search", "unheard-of"]);
    assert!(!refused.success && refused.stderr.contains("longer than 4 MiB"), "{}", refused.stderr);
}
