//! `consort serve`: serves a model over HTTP.

mod load;
pub(super) mod logs;
mod shutdown;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use server::{ApiKeys, App, Config, HeaderValue, Listener, Tls};
use tokio::sync::oneshot;
use tracing::info;

use crate::options::{ModelOptions, ThreadOption, cpus};
use crate::store::DEFAULT_REPO;
use load::CacheOptions;
use logs::LogFormat;
use shutdown::Signals;

/// The maximum size of a file of API keys, certificates or a private key.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Threads of the HTTP server. The model has compute threads of its own.
const HTTP_THREADS: usize = 2;
/// The most threads that parse bodies, render prompts and compile grammars, however many CPUs there are: each may use
/// hundreds of megabytes for a hostile body.
const PROMPT_THREADS_MAX: usize = 8;

/// Serve a model over HTTP: OpenAI's and Anthropic's APIs, metrics, and a chat page
///
/// The server listens at once; `/ready` tells when the model is loaded. Ctrl-C lets running requests finish, a second one
/// ends at once.
#[derive(Args, Debug)]
pub struct ServeArgs {
    /// Hub model (owner/name, owner/name:Q4_K_M), folder or .gguf file [default: a small model]
    model: Option<String>,
    #[command(flatten)]
    http: HttpOptions,
    #[command(flatten)]
    cache: CacheOptions,
    #[command(flatten)]
    threads: ThreadOption,
    #[command(flatten)]
    options: ModelOptions,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Who may ask, and where")]
struct HttpOptions {
    /// Address to listen on; 0.0.0.0 is every address of this machine
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 is any free port
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// API key that clients must send; may be repeated, each key is a tenant of its own
    #[arg(long = "api-key", value_name = "KEY", env = "CONSORT_API_KEY", hide_env_values = true)]
    api_keys: Vec<String>,
    /// File of API keys, one per line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// TLS certificate chain (PEM): serve HTTPS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// Private key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Origin that CORS allows, or *; may be repeated
    #[arg(long, value_name = "ORIGIN")]
    cors: Vec<HeaderValue>,
    /// Model name in the API [default: the model's own name]; may be repeated for aliases
    #[arg(long = "served-model-name", value_name = "NAME")]
    names: Vec<String>,
    /// Maximum size of a request body, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = server::BODY_BYTES_MAX)]
    max_body: usize,
    /// Seconds that running requests get to finish at shutdown
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    grace: u64,
    /// Log format, on standard error
    #[arg(long, value_enum, default_value_t)]
    log: LogFormat,
}

impl ServeArgs {
    pub fn run(self) -> Result<ExitCode> {
        logs::install(self.http.log, "info")?;
        let config = self.config()?;
        let tls = self.http.tls()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(HTTP_THREADS)
            .max_blocking_threads(cpus().clamp(2, PROMPT_THREADS_MAX))
            .thread_name("http")
            .enable_all()
            .build()
            .context("start the threads of the server")?;
        let result = runtime.block_on(self.serve(App::new(config), tls));
        // Does not wait for a model that is still loading.
        runtime.shutdown_background();
        result
    }

    async fn serve(self, app: Arc<App>, tls: Option<Tls>) -> Result<ExitCode> {
        let (host, port, grace) = (self.http.host.clone(), self.http.port, Duration::from_secs(self.http.grace));
        let scheme = if tls.is_some() { "https" } else { "http" };
        let mut signals = Signals::listen()?;
        let listener = Listener::bind(&host, port, tls).await?;
        let address = listener.address().context("find out the address")?;
        info!(model = app.config().model, "listening on {scheme}://{address}");

        let (failed, failure) = oneshot::channel();
        load::spawn_loader(self, Arc::clone(&app), failed)?;
        shutdown::run(listener, &app, &mut signals, failure, grace).await
    }

    fn config(&self) -> Result<Config> {
        let given = self.model.as_deref().unwrap_or(DEFAULT_REPO);
        let own = short_name(given);
        let mut names = self.http.names.iter().cloned();
        let mut config = Config::new(names.next().unwrap_or_else(|| own.to_owned()));
        config.aliases = names.chain((own != given && self.http.names.is_empty()).then(|| given.to_owned())).collect();
        config.keys = self.http.keys()?;
        config.body_bytes_max = self.http.max_body;
        config.origins = self.http.cors.clone();
        Ok(config)
    }
}

impl HttpOptions {
    fn keys(&self) -> Result<ApiKeys> {
        let file = self.api_key_file.as_deref().map(read).transpose()?.unwrap_or_default();
        let file = String::from_utf8(file).context("read the API keys: the file is not text")?;
        let keys = self.api_keys.iter().map(String::as_str).chain(ApiKeys::lines(&file));
        let keys = ApiKeys::new(keys)?;
        anyhow::ensure!(
            self.api_key_file.is_none() || !keys.is_empty(),
            "the file of API keys has no key in it: every client would have access"
        );
        Ok(keys)
    }

    fn tls(&self) -> Result<Option<Tls>> {
        let (Some(certificates), Some(key)) = (&self.tls_cert, &self.tls_key) else { return Ok(None) };
        Ok(Some(Tls::from_pem(&read(certificates)?, &read(key)?)?))
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let bytes = fs::metadata(path).with_context(|| format!("read {}", path.display()))?.len();
    anyhow::ensure!(bytes <= FILE_BYTES_MAX, "{} is longer than {FILE_BYTES_MAX} bytes", path.display());
    fs::read(path).with_context(|| format!("read {}", path.display()))
}

/// The name of a model that is a local file or folder. Clients do not see its path.
fn short_name(given: &str) -> &str {
    let path = Path::new(given);
    if !path.exists() {
        return given;
    }
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or(given);
    name.strip_suffix(".gguf").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_on_disk_is_called_by_its_last_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tiny-q8_0.gguf");
        fs::write(&file, "").unwrap();
        assert_eq!(short_name(file.to_str().unwrap()), "tiny-q8_0");
        assert_eq!(short_name("owner/name:Q4_K_M"), "owner/name:Q4_K_M");
    }
}
