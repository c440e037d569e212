// Generates text with nothing but gateway.proto and a gRPC library, as any client could.
//
// Usage: node generate.mjs ADDRESS PROMPT MAX_NEW_TOKENS
//
// Prints one JSON object. If the call fails, writes its status to standard error and exits with 1.

import path from "node:path";
import { fileURLToPath } from "node:url";
import { credentials, loadPackageDefinition, status } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const DEADLINE_MS = 120_000;
const PROTOS = fileURLToPath(new URL("../../protos/", import.meta.url));

/** Collects one whole completion: text, token ids and what the server tells about them. */
async function generate(client, prompt, maxNewTokens) {
  const call = client.Generate(
    {
      text: prompt,
      sampling: { temperature: 0 },
      stopping: { max_new_tokens: maxNewTokens },
    },
    { deadline: Date.now() + DEADLINE_MS },
  );
  let text = "";
  const tokenIds = [];
  let completion = null;
  for await (const response of call) {
    if (response.event === "chunk") {
      text += response.chunk.text;
      tokenIds.push(...response.chunk.token_ids);
    } else if (response.event === "completion") {
      completion = response.completion;
    }
  }
  if (completion === null) {
    throw new Error("the stream ended without a completion");
  }
  const { finish_reason, usage, speculation } = completion;
  return { text, token_ids: tokenIds, finish_reason, usage, speculation };
}

const [address, prompt, maxNewTokens] = process.argv.slice(2);
if (maxNewTokens === undefined) {
  console.error("usage: node generate.mjs ADDRESS PROMPT MAX_NEW_TOKENS");
  process.exit(2);
}

const definition = loadSync(path.join("specdec", "v1", "gateway.proto"), {
  includeDirs: [PROTOS],
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { GenerationService } = loadPackageDefinition(definition).specdec.v1;
const client = new GenerationService(address, credentials.createInsecure());
try {
  console.log(JSON.stringify(await generate(client, prompt, Number(maxNewTokens))));
} catch (error) {
  console.error(`${status[error.code] ?? "ERROR"}: ${error.details ?? error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
