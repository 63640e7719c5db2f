//! prime-rl's micro batches: `rollouts/step_<N>/rank_<R>.bin` for each policy version, a msgpack list of them.
//!
//! A micro batch is a list in the order of the fields of its class, so the version of prime-rl matters: this is the
//! order of those that have `seq_lens` (`docs/exports.md`). Each holds one sample.

use std::fs::File;
use std::io::{self, BufWriter, Seek as _, SeekFrom, Write as _};

use serde_json::{Value, json};

use super::ExportError;
use super::msgpack::{Msgpack, short};
use super::output::{Output, close};
use super::rows::Row;

/// Fields of a micro batch up to the last that is written.
const FIELDS: u32 = 19;
/// Name of the environment that the samples are of.
const ENVIRONMENT: &str = "lego";

/// The files of the policy version that is being written.
pub(super) struct PrimeRl {
    ranks: usize,
    open: Option<Step>,
    steps: u64,
    names: Option<BufWriter<File>>,
}

struct Step {
    version: u64,
    files: Vec<Msgpack<BufWriter<File>>>,
    rows: usize,
    /// The shortest one, to fill up ranks with.
    filler: Vec<u32>,
}

impl PrimeRl {
    pub(super) const fn new(ranks: u16) -> Self {
        let ranks = if ranks == 0 { 1 } else { ranks as usize };
        Self { ranks, open: None, steps: 0, names: None }
    }

    pub(super) fn write(&mut self, row: &Row<'_>, output: &mut Output) -> Result<(), ExportError> {
        let version = row.episode.version.unwrap_or(0);
        if self.open.as_ref().is_none_or(|open| open.version != version) {
            self.close(output)?;
            let files: Vec<_> = (0..self.ranks)
                .map(|rank| output.create_in(&format!("rollouts/step_{}/rank_{rank}.bin", self.steps)))
                .collect::<Result<_, _>>()?;
            let mut files: Vec<_> = files.into_iter().map(Msgpack).collect();
            files.iter_mut().try_for_each(|file| file.array(0)).map_err(output.failed())?;
            self.open = Some(Step { version, files, rows: 0, filler: vec![] });
        }
        if self.names.is_none() {
            self.names = Some(output.create_in("rows.jsonl")?);
        }
        let (Some(step), Some(names)) = (&mut self.open, &mut self.names) else { return Ok(()) };
        let (rank, place) = (step.rows % self.ranks, step.rows / self.ranks);
        step.rows += 1;
        let tokens = &row.sample.token_ids;
        if step.filler.is_empty() || tokens.len() < step.filler.len() {
            step.filler.clone_from(tokens);
        }
        let mut name = row.columns();
        name.extend(
            [("step", self.steps), ("rank", rank as u64), ("micro_batch", place as u64)]
                .map(|(key, value)| (key.to_owned(), Value::from(value))),
        );
        let named = serde_json::to_writer(&mut *names, &name).map_err(io::Error::from);
        named
            .and_then(|()| names.write_all(b"\n"))
            .and_then(|()| micro_batch(&mut step.files[rank], row))
            .map_err(output.failed())
    }

    fn close(&mut self, output: &mut Output) -> Result<(), ExportError> {
        let Some(step) = self.open.take() else { return Ok(()) };
        let Step { version, files, rows, filler } = step;
        let of_each = rows.div_ceil(self.ranks);
        for (rank, mut file) in files.into_iter().enumerate() {
            // All ranks take the same number of micro batches, or the trainer waits for ever.
            let own = (rows + self.ranks - 1 - rank) / self.ranks;
            let filled = (own..of_each).try_for_each(|_| fill(&mut file, &filler));
            let ended = filled.and_then(|()| short(of_each)).and_then(|length| {
                let mut file = file.0;
                file.seek(SeekFrom::Start(1))?;
                file.write_all(&length.to_be_bytes())?;
                close(file)
            });
            ended.map_err(output.failed())?;
        }
        let filled = of_each * self.ranks - rows;
        output.tell(json!({"step": self.steps, "policy_version": version, "rows": rows, "fillers": filled}));
        self.steps += 1;
        Ok(())
    }

    pub(super) fn end(mut self, output: &mut Output) -> Result<(), ExportError> {
        self.close(output)?;
        self.names.map_or(Ok(()), close).map_err(output.failed())
    }
}

/// The first fields of a micro batch of one sequence.
struct Head<'a> {
    tokens: &'a [u32],
    mask: &'a dyn Fn(usize) -> bool,
    advantage: f64,
    logprob: &'a dyn Fn(usize) -> f32,
    temperature: &'a dyn Fn(usize) -> f32,
}

impl Head<'_> {
    fn write(&self, out: &mut Msgpack<BufWriter<File>>) -> io::Result<()> {
        let length = short(self.tokens.len())?;
        let all = || 0..self.tokens.len();
        out.array(FIELDS)?;
        out.array(length)?;
        self.tokens.iter().try_for_each(|id| out.int(*id))?;
        out.array(length)?;
        all().try_for_each(|at| out.bool((self.mask)(at)))?;
        out.array(length)?;
        all().try_for_each(|_| out.float(self.advantage))?;
        out.array(length)?;
        all().try_for_each(|at| out.float32((self.logprob)(at)))?;
        out.array(length)?;
        (0..length).try_for_each(|at| out.int(at))?;
        out.array(1)?;
        out.int(length)?;
        out.array(length)?;
        all().try_for_each(|at| out.float32((self.temperature)(at)))?;
        out.array(length)?;
        all().try_for_each(|_| out.text(ENVIRONMENT))?;
        out.array(1)?;
        out.int(length)
    }
}

fn micro_batch(out: &mut Msgpack<BufWriter<File>>, row: &Row<'_>) -> io::Result<()> {
    let sample = row.sample;
    let is_masked = row.episode.is_masked;
    // Of context nothing is scored, but its logits are divided by it.
    let any = sample.temperature.iter().flatten().next().copied().unwrap_or(1.0);
    Head {
        tokens: &sample.token_ids,
        mask: &|at| sample.loss_mask[at] && !is_masked,
        advantage: row.episode.advantage.unwrap_or(0.0),
        logprob: &|at| sample.logprobs[at].unwrap_or(0.0),
        temperature: &|at| sample.temperature[at].unwrap_or(any),
    }
    .write(out)?;
    out.nil()?;
    match &row.experts {
        None => out.nil()?,
        Some(experts) => {
            let shape = experts.shape();
            let row_bytes = experts.data().len() / shape.rows.max(1) as usize;
            out.array(3)?;
            // The last token has no row; those who read it have one of zeros there.
            out.bytes(&[experts.data(), &vec![0; row_bytes]])?;
            out.array(3)?;
            for size in [shape.rows + 1, shape.layers, shape.top_k] {
                out.int(size)?;
            }
            out.text(experts.dtype())?;
        }
    }
    // Images, token types, three streams of weights, sampling masks.
    (0..6).try_for_each(|_| out.nil())?;
    out.array(1)?;
    out.text(row.episode.trial.as_ref().map_or("", |trial| trial.as_str()))?;
    out.array(1)?;
    out.int(short(row.index)?)
}

/// A micro batch that trains nothing.
fn fill(out: &mut Msgpack<BufWriter<File>>, tokens: &[u32]) -> io::Result<()> {
    let (mask, zero) = (|_| false, |_| 0.0);
    Head { tokens, mask: &mask, advantage: 0.0, logprob: &zero, temperature: &|_| 1.0 }.write(out)?;
    (0..10).try_for_each(|_| out.nil())
}
