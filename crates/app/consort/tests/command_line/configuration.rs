//! The configuration file, through the binary: what it changes, what comes before it, and mistakes in it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::{consort, oracle, text};
use testing::bounded;
use testing::serving::Server;

/// Runs a command with a configuration folder of its own. Returns the status, the output and the errors.
fn run(folder: &Path, args: &[&str], environment: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let mut command = consort(args);
    command.env_remove("CONSORT_CONFIG").env("XDG_CONFIG_HOME", folder).envs(environment.iter().copied());
    let output = bounded::output(&mut command);
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn configured(file: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("consort")).unwrap();
    fs::write(folder.path().join("consort/config.toml"), file).unwrap();
    folder
}

#[test]
fn the_file_has_what_is_always_typed() {
    let models = tempfile::tempdir().unwrap();
    let [model, other] = ["llama", "qwen3"].map(|name| {
        let path = models.path().join(name);
        symlink(oracle(&format!("{name}/model-f32")), &path).unwrap();
        path.display().to_string()
    });
    let folder =
        configured(&format!("temperature = 0\nmax_tokens = 3\n[run]\nmodel = {model:?}\njson = true\nraw = true\n"));
    let tokens = |args: &[&str], environment: &[(&str, &str)]| {
        let (code, out, error) = run(folder.path(), &[&["run"], args].concat(), environment);
        assert_eq!(code, Some(0), "{args:?}: {error}");
        let report: Value = serde_json::from_str(&out).unwrap();
        (report["model"].as_str().unwrap().to_owned(), report["tokens"].as_array().unwrap().len())
    };
    assert_eq!(tokens(&["Morning near"], &[]), ("llama".to_owned(), 3));
    assert_eq!(tokens(&["Morning near", "-n", "5"], &[]), ("llama".to_owned(), 5));
    assert_eq!(tokens(&[&other, "Morning near"], &[]).0, "qwen3");
    assert_eq!(tokens(&["-m", &other, "Morning near"], &[]).0, "qwen3");

    let (_, plain, error) = run(folder.path(), &["run", "--no-config", &model, "Morning", "-n", "1"], &[]);
    assert!(!plain.starts_with('{'), "{plain}{error}");
    let (_, plain, error) = run(folder.path(), &["run", &model, "Morning", "-n", "1"], &[("CONSORT_CONFIG", "")]);
    assert!(!plain.starts_with('{'), "{plain}{error}");
    let another = folder.path().join("another.toml");
    fs::write(&another, "max-tokens = 2\njson = true\n").unwrap();
    let another = another.to_str().unwrap();
    assert_eq!(tokens(&[&model, "Morning near"], &[("CONSORT_CONFIG", another)]).1, 2);
    assert_eq!(tokens(&[&model, "Morning near", "--config", another], &[]).1, 2);
}

#[test]
fn what_is_for_a_model_here_does_not_hold_for_one_on_a_server() {
    let folder = configured("threads = 1\n[chat]\ncontext = 512\ntemperature = 0\n");
    let (code, _, error) = run(folder.path(), &["chat", "--url", "http://127.0.0.1:9"], &[]);
    assert!(code == Some(1) && error.contains("127.0.0.1:9") && !error.contains("--threads"), "{error}");
    let (code, _, error) = run(folder.path(), &["chat", "--url", "http://127.0.0.1:9", "--threads", "1"], &[]);
    assert!(code == Some(2) && error.contains("--threads"), "{error}");
}

#[test]
fn a_mistake_is_one_line_with_file_line_and_key() {
    let model = oracle("llama/model-f32");
    for (file, args, why) in [
        ("threads = 1\ntempersture = 1\n", &["run", &model, "x"][..], ":2: unknown key `tempersture`"),
        (
            "\n[run]\ntemperature = -1\n",
            &["run", &model, "x"],
            ":3: invalid value '-1' for 'temperature': it must be from 0",
        ),
        ("[serve]\ncluster = 7\n", &["serve", &model], ":2: `cluster`: it must be true or false"),
        ("[serve]\ntls-cert = \"x\"\n", &["serve", &model], "config.toml: the following required arguments"),
    ] {
        let folder = configured(file);
        let (code, out, error) = run(folder.path(), args, &[]);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{file}: {error}");
        assert!(error.contains("config.toml") && error.contains(why) && error.lines().count() == 1, "{file}: {error}");
    }
    // A rank process is started by a program that has read the file itself.
    let broken = configured("nonsense\n");
    assert_eq!(run(broken.path(), &["list"], &[]).0, Some(2));
    assert_eq!(run(broken.path(), &["--worker", "--rank", "0", "--tp-size", "1"], &[]).0, Some(0));
    assert_eq!(run(broken.path(), &["--help"], &[]).0, Some(0));
}

#[test]
fn the_environment_comes_before_the_file() {
    let server = Server::start(&["--api-key", "a-key-of-this-test"]);
    let folder = configured("api-key = \"a-key-of-this-test\"\n");
    let url = format!("http://{}", server.address);
    let ask = |environment: &[(&str, &str)]| run(folder.path(), &["ps", "--url", &url], environment);
    let (code, _, error) = ask(&[]);
    assert_eq!(code, Some(0), "{error}");
    let (code, _, error) = ask(&[("CONSORT_API_KEY", "another")]);
    assert!(code == Some(1) && error.contains("does not know this key"), "{error}");
}
